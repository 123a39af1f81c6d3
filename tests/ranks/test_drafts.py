"""Drafts of every kind on ranks that are processes: the tokens, trees and accept lengths of one rank."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.arch import read_target
from tests.families import VOCAB
from tests.loading import check_draft
from tests.parity.pairs import algorithm_of, draft_of
from tests.ranks.compare import Tally, check
from tests.ranks.gang import Case
from tests.ranks.test_parity import Gangs, config
from tests.ranks.workload import workload
from tests.tiny import target_folder

REQUESTS = 12
DRAFTS = (
    "eagle1-layers", "eagle1-map", "mla", "windows", "mistral", "mistral-fp8", "mistral-mla", "mimo", "nextn",
    "nextn-sparse", "step", "qwen3-next", "glm", "mimo x3", "nextn x3", "nextn-sparse x3", "step x3",
)  # fmt: skip
"""Names of the registry: every kind of draft but the plain EAGLE-3, which `test_parity` runs everywhere."""
LISTS = [name for name in DRAFTS if name.endswith("x3")]
CHAIN, TREE = {"topk": 1, "num_steps": 3}, {"topk": 6, "num_steps": 3}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp, sharded": (1, TREE | {"chunked_prefill_size": 7}),
    "tp, replicated": (1, TREE | {"speculative_draft_parallel": "replicated", "num_steps": 2, "page_size": 1}),
    "tp, sharded chain": (1, CHAIN | {"page_size": 16}),
    "dp, sharded": (2, TREE | {"dp_padding": "exact", "vocab_parallel": "world", "chunked_prefill_size": 7}),
    "dp, padded": (2, TREE | {"dp_padding": "padded", "debug_lockstep": True, "speculative_batch_tiers": {1: 2}}),
    "dp, replicated": (2, TREE | {"speculative_draft_parallel": "replicated", "vocab_parallel": "world"}),
    "dp, sharded chain": (2, CHAIN | {"page_size": 1, "chunked_prefill_size": 5}),
}
HALVES = (
    ("tp, sharded chain", "tp, replicated", "dp, sharded", "dp, padded"),
    ("tp, sharded", "dp, replicated", "dp, sharded chain", "dp, padded"),
)
"""Each draft has one of these: chain and tree, sharded and replicated, one group and two, padded and not."""
FAST = [
    ("eagle1-map", "dp, sharded"),
    ("mla", "tp, sharded"),
    ("mistral", "tp, replicated"),
    ("nextn-sparse", "dp, replicated"),
    ("mimo x3", "dp, sharded"),
    ("step x3", "dp, padded"),
    ("nextn x3", "tp, sharded chain"),
]


def target() -> str:
    """Of flat distributions: a sampled token owes much to its noise, so that a draft coupled to it is often right.

    And no logit is so large that log-probabilities end at their floor, where ties are broken by rounding.
    """
    return target_folder(spread=0.015)


def case_of(draft: str, mesh: str, requests: int = REQUESTS) -> Case:
    """A gang of two; under data parallelism requests come unevenly, so that one rank is idle now and then."""
    dp, settings = MESHES[mesh]
    folder = draft_of(draft)
    algorithm = algorithm_of(check_draft(folder, read_target(target())))
    actions = workload(len(draft), dp, requests, vocab=VOCAB, horizon=16, longest=30, most_tokens=14)
    given = settings | {"tp_size": 2, "attn_dp_size": dp, "speculative_algorithm": algorithm}
    return Case(config(target(), folder, **given), actions)


def checked(gangs: Gangs, draft: str, mesh: str, requests: int = REQUESTS) -> Tally:
    tally = check(gangs(2), case_of(draft, mesh, requests))
    print(f"{draft}, {mesh}: {tally}")
    assert not tally.mismatches, tally.mismatches
    assert tally.compared == tally.counted == requests
    assert MESHES[mesh][0] == 1 or (tally.idle > 0 and tally.uneven > tally.steps / 3), tally
    assert (tally.padded > 0) == ("padded" in mesh), tally
    return tally


@pytest.mark.parametrize(("draft", "mesh"), FAST)
def test_two_ranks_match_one_rank_for_selected_drafts(ranks: Gangs, draft: str, mesh: str) -> None:
    checked(ranks, draft, mesh)


def test_weaker_draft_on_one_rank_is_detected_as_a_mismatch(ranks: Gangs) -> None:
    """Random drafts are seldom right, so accept lengths tell little; their trees tell."""
    case = replace(case_of("mimo x3", "dp, sharded"), plant="weak draft", guilty=0, at_step=0)
    tally = check(ranks(2), case)
    assert len(tally.mismatches) > 3 and all("other trees" in m or "accept lengths" in m for m in tally.mismatches)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("draft", DRAFTS)
def test_two_ranks_match_one_rank_for_each_draft_on_half_of_the_meshes(ranks: Gangs, draft: str) -> None:
    total = Tally()
    for mesh in HALVES[DRAFTS.index(draft) % 2]:
        total += checked(ranks, draft, mesh, 2 * REQUESTS)
    assert sum(total.accepted[j] for j in total.accepted if j) > 20, total.accepted


@pytest.mark.slow
@pytest.mark.parametrize("draft", LISTS)
def test_multi_layer_drafts_survive_retraction_and_aborts_on_two_ranks(ranks: Gangs, draft: str) -> None:
    """What a runner gave lies by slot beside its pool: retraction and aborts must not mix it up."""
    case = case_of(draft, "dp, sharded")
    actions = workload(3, 2, 3 * REQUESTS, vocab=VOCAB, horizon=10, longest=30, most_tokens=24, aborts=0.15)
    tally = check(ranks(2), replace(case, config=case.config | {"max_total_tokens": 80}, actions=actions))
    print(f"{draft}, scarce: {tally}")
    assert not tally.mismatches, tally.mismatches
    assert tally.retracted > 0 and tally.aborted > 0 and tally.counted > REQUESTS, tally


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp, sharded", "dp, padded", "dp, replicated"])
@pytest.mark.parametrize("draft", LISTS)
def test_multi_layer_drafts_on_four_ranks_match_one_rank(ranks: Gangs, draft: str, mesh: str) -> None:
    """Two groups of two: followers, and rows that travel between groups."""
    case = case_of(draft, mesh)
    tally = check(ranks(4), replace(case, config=case.config | {"tp_size": 4}))
    print(f"{draft}, {mesh}, four ranks: {tally}")
    assert not tally.mismatches and tally.counted == REQUESTS, tally
