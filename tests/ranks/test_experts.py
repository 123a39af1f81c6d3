"""Whole experts spread over ranks: the tokens, trees and accept lengths of one rank that holds them all."""

from typing import Any

import pytest

from cluster.arch import read_target
from tests.families import FAMILIES, VOCAB, made
from tests.loading import check_draft
from tests.parity.pairs import algorithm_of, draft_of
from tests.ranks.compare import Tally, check
from tests.ranks.gang import Case
from tests.ranks.test_parity import Gangs, config
from tests.ranks.workload import workload
from tests.tiny import draft_folder, target_folder
from tests.unit.models.quantised_folders import quantised
from tests.unit.models.test_quantised import packed_experts

SPARSE = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe")
UNEVEN = ("mixtral", "three of five, window of 8")
SHAPES: dict[str, dict[str, Any]] = {"chain": {"topk": 1, "num_steps": 3}, "tree": {"topk": 3, "num_steps": 3}}
WORLD: dict[str, Any] = {"vocab_parallel": "world"}
MESHES: dict[str, dict[str, Any]] = {
    "two ranks that have all rows": {"tp_size": 2, "ep_size": 2},
    "two, by counts": {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "dp_padding": "exact"},
    "two, to all": {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "dp_padding": "padded"} | WORLD,
    "four, by counts": {"tp_size": 4, "attn_dp_size": 4, "ep_size": 4, "dp_padding": "exact"} | WORLD,
    "four in two groups": {"tp_size": 4, "attn_dp_size": 2, "ep_size": 4, "dp_padding": "exact"},
    "four, two to a part": {"tp_size": 4, "attn_dp_size": 2, "ep_size": 2, "dp_padding": "exact"},
    "four in one group": {"tp_size": 4, "ep_size": 2},
}
DRAFTS = ("nextn-sparse", "glm", "qwen3-next", "nextn-sparse x3")
REQUESTS = 8


def checked(gangs: Gangs, target: str, mesh: str, shape: str, draft: str | None = None, **more: Any) -> Tally:
    given = MESHES[mesh] | SHAPES[shape] | {"chunked_prefill_size": 16, "debug_lockstep": True} | more
    dp, vocab = given.get("attn_dp_size", 1), read_target(target).vocab_size
    actions = workload(dp, dp, REQUESTS, vocab=vocab, horizon=6, longest=30, most_tokens=10)
    case = Case(config(target, draft or draft_folder(target), **given), actions)
    tally = check(gangs(case.world), case)
    print(f"{mesh}, {shape}: {tally}")
    assert not tally.mismatches, tally.mismatches
    assert tally.compared == tally.counted == REQUESTS
    return tally


@pytest.mark.parametrize(("mesh", "shape"), [("two, by counts", "tree"), ("two ranks that have all rows", "chain")])
def test_five_experts_on_two_ranks_match_one_rank(ranks: Gangs, mesh: str, shape: str) -> None:
    tally = checked(ranks, made(*UNEVEN).folder, mesh, shape)
    assert "all rows" in mesh or tally.idle > 0, "a rank without rows takes part"


@pytest.mark.slow
@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("mesh", MESHES)
def test_moe_families_on_each_expert_mesh_match_one_rank(ranks: Gangs, mesh: str, family: str) -> None:
    """With each mesh; its configs take turns, and so do chain and tree, which each mesh and each family meets."""
    cases = list(FAMILIES[family].cases)
    turn = list(MESHES).index(mesh)
    shape = list(SHAPES)[(turn + SPARSE.index(family)) % 2]
    checked(ranks, made(family, cases[turn % len(cases)]).folder, mesh, shape)


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("mesh", MESHES)
def test_moe_drafts_on_each_expert_mesh_match_one_rank(ranks: Gangs, mesh: str, draft: str) -> None:
    """Of a target without any, or with a number of its own, by turns; chains and trees as well."""
    turn = list(MESHES).index(mesh) + DRAFTS.index(draft)
    dense, shape = turn % 2 == 0, list(SHAPES)[turn // 2 % 2]
    target, folder = target_folder(spread=0.015) if dense else made(*UNEVEN).folder, draft_of(draft)
    spec = check_draft(folder, read_target(target))
    tally = checked(ranks, target, mesh, shape, folder, speculative_algorithm=algorithm_of(spec))
    assert not dense or sum(tally.accepted[j] for j in tally.accepted if j) > 0


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["two, by counts", "four, two to a part"])
def test_replicated_moe_draft_matches_one_rank(ranks: Gangs, mesh: str) -> None:
    target, folder = made(*UNEVEN).folder, draft_of("nextn-sparse")
    algorithm = algorithm_of(check_draft(folder, read_target(target)))
    more = {"speculative_algorithm": algorithm, "speculative_draft_parallel": "replicated"}
    checked(ranks, target, mesh, "tree", folder, **more)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["two, by counts", "two ranks that have all rows"])
@pytest.mark.parametrize("kind", ["fp8 tensor", "fp8 block", "int8 zeros", "int4", "awq", "gptq", "mxfp4"])
def test_quantised_experts_on_two_ranks_match_one_rank(ranks: Gangs, kind: str, mesh: str) -> None:
    """Three experts on two ranks, each read whole."""
    folder = packed_experts()[0] if kind == "mxfp4" else quantised(kind, experts=True)[0]
    checked(ranks, folder, mesh, "tree")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["two, by counts", "two, to all", "four in two groups"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_captured_expert_parallel_steps_match_one_rank(ranks: Gangs, family: str, mesh: str) -> None:
    """A step that is captured sends rows to all, since it must not ask for a count; others go on sending by counts."""
    target = made(family, next(iter(FAMILIES[family].cases))).folder
    given = MESHES[mesh] | SHAPES["tree"] | {"capture": "on", "capture_sizes": [1, 2, 4, 8]}
    dp = given["attn_dp_size"]
    actions = workload(5, dp, 30, vocab=VOCAB, horizon=50, longest=30, most_tokens=14)
    case = Case(config(target, draft_folder(target), **given), actions)
    tally = check(ranks(case.world), case)
    print(f"{mesh}: {tally}")
    assert not tally.mismatches and tally.replayed > 10, tally


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "mesh"), [("float32", "two, by counts"), ("bfloat16", "four in two groups")])
def test_expert_parallel_requests_finish_in_lower_precision(ranks: Gangs, dtype: str, mesh: str) -> None:
    target = made("deepseek_v3", "low-rank queries").folder
    given = MESHES[mesh] | SHAPES["tree"] | {"dtype": dtype, "debug_lockstep": True}
    actions = workload(5, 2, 12, vocab=VOCAB, horizon=10, longest=30, most_tokens=14)
    case = Case(config(target, draft_folder(target), **given), actions)
    lives = ranks(case.world).lives(case)
    assert {name for life in lives for name in life.ended} == {a.request["request_id"] for a in actions}
