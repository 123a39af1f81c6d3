"""Drafts of every kind on several rank processes give the tokens, trees and accept lengths of a single rank."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.arch import read_target
from tests.distributed.compare import Tally, check
from tests.distributed.gang import Case
from tests.distributed.test_parity import RanksFactory, config
from tests.distributed.workload import workload
from tests.parity.pairs import algorithm_of, draft_of
from tests.support.families import VOCAB, family_checkpoint
from tests.support.gemma4_assistant import assistant
from tests.support.loading import check_draft
from tests.support.tiny_checkpoints import target_folder

REQUESTS = 12
DRAFTS = (
    "eagle1-layers", "eagle1-map", "mla", "windows", "mistral", "mistral-fp8", "mistral-mla", "mimo", "nextn",
    "nextn-sparse", "step", "qwen3-next", "glm", "mimo x3", "mimo-v2 x3", "nextn x3", "nextn-sparse x3", "step x3",
    "step-3.5 x3",
)  # fmt: skip
"""Names of drafts in the test registry: every kind of draft except plain EAGLE-3, which `test_parity` runs everywhere.
"""
LISTS = [name for name in DRAFTS if name.endswith("x3")]
"""The drafts with several layers."""
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
"""Each draft runs on one of these two lists of meshes. Each list has chain and tree, sharded and replicated drafts, one
attention group and two, padded and unpadded steps.
"""
FAST = [
    ("eagle1-map", "dp, sharded"),
    ("mistral", "tp, replicated"),
    ("nextn-sparse", "dp, replicated"),
    ("step x3", "dp, padded"),
    ("nextn x3", "tp, sharded chain"),
]


def flat_target() -> str:
    """A target with flat distributions: which token is sampled depends mostly on the noise. Target and draft use the
    same noise, so the draft is often right.

    No logit is so large that log-probabilities reach their floor, where rounding would break ties.
    """
    return target_folder(spread=0.015)


def draft_case(draft: str, mesh: str, request_count: int = REQUESTS) -> Case:
    """A case for a gang of two. With data parallelism the ranks get different numbers of requests, so that one rank is
    idle in some steps.
    """
    dp, settings = MESHES[mesh]
    folder = draft_of(draft)
    algorithm = algorithm_of(check_draft(folder, read_target(flat_target())))
    actions = workload(len(draft), dp, request_count, vocab=VOCAB, horizon=16, max_prompt_tokens=30, max_new_tokens=14)
    config_settings = settings | {"tp_size": 2, "attn_dp_size": dp, "speculative_algorithm": algorithm}
    return Case(config(flat_target(), folder, **config_settings), actions)


def check_draft_on_mesh(ranks: RanksFactory, draft: str, mesh: str, request_count: int = REQUESTS) -> Tally:
    tally = check(ranks(2), draft_case(draft, mesh, request_count))
    print(f"{draft}, {mesh}: {tally}")
    assert not tally.mismatches, tally.mismatches
    assert tally.compared_requests == tally.compared_trees == request_count
    assert MESHES[mesh][0] == 1 or (tally.idle_rank_steps > 0 and tally.uneven_steps > tally.steps / 3), tally
    assert (tally.padding_rows > 0) == ("padded" in mesh), tally
    return tally


@pytest.mark.parametrize(("draft", "mesh"), FAST)
def test_two_ranks_match_one_rank_for_selected_drafts(ranks: RanksFactory, draft: str, mesh: str) -> None:
    check_draft_on_mesh(ranks, draft, mesh)


@pytest.mark.parametrize(
    "mesh",
    [
        mesh if mesh in ("tp, sharded", "dp, padded") else pytest.param(mesh, marks=pytest.mark.slow)
        for mesh in MESHES
        if mesh != "tp, replicated"
    ],
)
def test_two_ranks_match_one_rank_for_a_draft_that_reads_the_cells_of_the_target(
    ranks: RanksFactory, mesh: str
) -> None:
    """The target has inputs of its layers too, and the draft another width than the target."""
    (dp, settings), (folder, _) = MESHES[mesh], assistant()
    target = family_checkpoint("gemma4", "layers that borrow, with inputs of their own").folder
    actions = workload(7, dp, REQUESTS, vocab=VOCAB, horizon=16, max_prompt_tokens=30, max_new_tokens=14)
    config_settings = settings | {"tp_size": 2, "attn_dp_size": dp, "speculative_algorithm": "NEXTN"}
    tally = check(ranks(2), Case(config(target, folder, **config_settings), actions))
    assert not tally.mismatches, tally.mismatches
    assert tally.compared_requests == tally.compared_trees == REQUESTS
    assert dp == 1 or tally.idle_rank_steps > 0


def test_weaker_draft_on_one_rank_is_detected_as_a_mismatch(ranks: RanksFactory) -> None:
    """Drafts with random weights are seldom right, so accept lengths show little of the fault. Their trees show it."""
    case = replace(draft_case("mimo x3", "dp, sharded"), plant="weak draft", guilty=0, at_step=0)
    tally = check(ranks(2), case)
    assert len(tally.mismatches) > 3 and all("other trees" in m or "accept lengths" in m for m in tally.mismatches)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("draft", DRAFTS)
def test_two_ranks_match_one_rank_for_each_draft_on_half_of_the_meshes(ranks: RanksFactory, draft: str) -> None:
    total = Tally()
    for mesh in HALVES[DRAFTS.index(draft) % 2]:
        total += check_draft_on_mesh(ranks, draft, mesh, 2 * REQUESTS)
    assert sum(total.trees_by_accept_length[j] for j in total.trees_by_accept_length if j) > 20, (
        total.trees_by_accept_length
    )


@pytest.mark.slow
@pytest.mark.parametrize("draft", LISTS)
def test_multi_layer_drafts_survive_retraction_and_aborts_on_two_ranks(ranks: RanksFactory, draft: str) -> None:
    """The hidden states that one draft runner passes to the next are kept by slot, beside the KV pools. Retraction and
    aborts must not mix them up. There are no window pools: their pages limit how many requests run at once, so none
    would be retracted.
    """
    case = draft_case(draft, "dp, sharded")
    actions = workload(
        3, 2, 3 * REQUESTS, vocab=VOCAB, horizon=10, max_prompt_tokens=30, max_new_tokens=24, abort_share=0.15
    )
    scarce = {"max_total_tokens": 80, "swa_full_tokens_ratio": 1}
    tally = check(ranks(2), replace(case, config=case.config | scarce, actions=actions))
    print(f"{draft}, scarce: {tally}")
    assert not tally.mismatches, tally.mismatches
    assert tally.retractions > 0 and tally.aborted_requests > 0 and tally.compared_trees > REQUESTS, tally


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp, sharded", "dp, padded", "dp, replicated"])
@pytest.mark.parametrize("draft", LISTS)
def test_multi_layer_drafts_on_four_ranks_match_one_rank(ranks: RanksFactory, draft: str, mesh: str) -> None:
    """Two attention groups of two ranks: there are followers, and rows go from one group to the other."""
    case = draft_case(draft, mesh)
    tally = check(ranks(4), replace(case, config=case.config | {"tp_size": 4}))
    print(f"{draft}, {mesh}, four ranks: {tally}")
    assert not tally.mismatches and tally.compared_trees == REQUESTS, tally
