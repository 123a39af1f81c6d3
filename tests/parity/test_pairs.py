"""Law 1 over every (target family, draft) pair that can be paired, as a chain and as a tree, to the last token."""

import pytest

import cluster.spec.step
from tests.families import FAMILIES
from tests.parity.pairs import DRAFTS, SHAPES, UNPAIRED, Pair, Tally, all_pairs, check, diagonal, refused


def test_what_cannot_be_paired() -> None:
    found = {(p.family, p.draft): refused(Pair(p.family, p.draft, 0)) for p in all_pairs()}
    told = {pair: why for pair, why in found.items() if why}
    assert told.keys() == UNPAIRED.keys(), told
    assert not [(pair, why) for pair, why in told.items() if UNPAIRED[pair] not in why]


@pytest.mark.parametrize("number", range(len(diagonal())))
def test_a_pair(number: int) -> None:
    """Each draft once and each family at least once, chain and tree by turns."""
    pair = diagonal()[number]
    tally = check(pair, list(SHAPES)[number % 2])
    assert not tally.mismatches
    assert tally.requests == 10 and tally.accepted == {1, 2, 3, 4} and tally.cached > 0, tally


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_a_path_left_where_the_tree_was_is_a_mismatch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.spec.step, "compact", lambda *_: None)
    assert check(Pair(family, "specforge", 0), "tree").mismatches


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_pairs(family: str) -> None:
    pairs = [p for p in all_pairs() if p.family == family and (family, p.draft) not in UNPAIRED]
    assert {p.case for p in pairs} == set(FAMILIES[family].cases)
    total = Tally()
    for pair in pairs:
        for shape in SHAPES:
            tally = check(pair, shape)
            assert tally.accepted == {1, 2, 3, 4} and tally.cached > 0, (pair, shape, tally)
            total += tally
    print(f"{family}: {len(pairs)} pairs, {total}")
    assert not total.mismatches
    assert len(pairs) >= len(DRAFTS) - 1 and total.requests == 5 * total.runs == 20 * len(pairs)
