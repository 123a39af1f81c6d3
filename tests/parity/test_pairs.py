"""Law 1 over every pair of a target family and a draft, with chains and with trees."""

from collections import defaultdict
from itertools import product

import pytest

import cluster.spec.step
from tests.parity.pairs import DRAFTS, SHAPES, Pair, Tally, all_pairs, check, diagonal, refusal_reason
from tests.support.families import FAMILIES
from tests.support.slow_cases import every_nth_fast


def test_every_draft_is_accepted_with_every_target_family() -> None:
    assert not [(str(pair), reason) for pair in all_pairs() if (reason := refusal_reason(pair))]


@pytest.mark.parametrize("number", every_nth_fast(2, range(len(diagonal()))))
def test_diagonal_pair_of_family_and_draft_matches_plain_decoding(number: int) -> None:
    """Each draft occurs once, and each family at least twice: with a chain and with a tree."""
    pair = diagonal()[number]
    tally = check(pair, list(SHAPES)[(number + number // len(FAMILIES)) % 2])
    assert not tally.mismatches
    assert tally.requests == 10 and tally.accepted == {1, 2, 3, 4} and tally.cached > 0, tally


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_missing_kv_compaction_is_detected_as_a_mismatch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.spec.step, "compact", lambda *_: None)
    assert check(Pair(family, "specforge", 0), "tree").mismatches


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_pairs_of_family_and_draft_match_plain_decoding(family: str) -> None:
    """Pairs use chains and trees in turn; the test below checks which combinations occur."""
    pairs = [p for p in all_pairs() if p.family == family]
    assert {p.case for p in pairs} == set(FAMILIES[family].cases)
    total = Tally()
    for pair in pairs:
        tally = check(pair, pair.shape)
        assert tally.accepted == {1, 2, 3, 4} and tally.cached > 0, (pair, tally)
        total += tally
    print(f"{family}: {len(pairs)} pairs, {total}")
    assert not total.mismatches
    assert len(pairs) == len(DRAFTS) and total.requests == 5 * total.runs == 10 * len(pairs)


def test_pairs_cover_all_shapes_page_sizes_and_chunks_per_family_and_draft() -> None:
    seen_variants = defaultdict[tuple[str, str], set[tuple[str, int]]](set)
    for pair in all_pairs():
        for name in (("family", pair.family), ("draft", pair.draft)):
            seen_variants[name].add((pair.shape, pair.turn % 9))
    assert len(seen_variants) == len(FAMILIES) + len(DRAFTS)
    assert all(variants == set(product(SHAPES, range(9))) for variants in seen_variants.values())
