"""Expert parallelism: ranks that hold different whole experts give the tokens, trees and accept lengths of a single
rank that holds all experts.
"""

from typing import Any

import pytest

from cluster.arch import read_target
from tests.distributed.compare import Tally, check
from tests.distributed.gang import Case
from tests.distributed.test_parity import RanksFactory, config
from tests.distributed.workload import workload
from tests.parity.pairs import algorithm_of, draft_of
from tests.support.families import FAMILIES, VOCAB, family_checkpoint
from tests.support.loading import check_draft
from tests.support.tiny_checkpoints import draft_folder, target_folder
from tests.unit.models.quantised_folders import quantised
from tests.unit.models.test_quantised import packed_experts

MOE_FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "mimo_v2", "gemma4_moe", "llama4")
FIVE_EXPERT_TARGET = ("mixtral", "three of five, window of 8")
SHAPES: dict[str, dict[str, Any]] = {"chain": {"topk": 1, "num_steps": 3}, "tree": {"topk": 3, "num_steps": 3}}
WORLD_VOCABULARY: dict[str, Any] = {"vocab_parallel": "world"}
MESHES: dict[str, dict[str, Any]] = {
    "two ranks that have all rows": {"tp_size": 2, "ep_size": 2},
    "two, by counts": {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "dp_padding": "exact"},
    "two, to all": {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "dp_padding": "padded"} | WORLD_VOCABULARY,
    "four, by counts": {"tp_size": 4, "attn_dp_size": 4, "ep_size": 4, "dp_padding": "exact"} | WORLD_VOCABULARY,
    "four in two groups": {"tp_size": 4, "attn_dp_size": 2, "ep_size": 4, "dp_padding": "exact"},
    "four, two to a part": {"tp_size": 4, "attn_dp_size": 2, "ep_size": 2, "dp_padding": "exact"},
    "four in one group": {"tp_size": 4, "ep_size": 2},
}
DRAFTS = ("nextn-sparse", "glm", "qwen3-next", "nextn-sparse x3")
REQUESTS = 8


def check_on_mesh(
    ranks: RanksFactory, target: str, mesh: str, shape: str, draft: str | None = None, **overrides: Any
) -> Tally:
    """Compare a gang with a single rank on a workload of `REQUESTS` requests; return the tally."""
    config_settings = MESHES[mesh] | SHAPES[shape] | {"chunked_prefill_size": 16, "debug_lockstep": True} | overrides
    dp, vocab = config_settings.get("attn_dp_size", 1), read_target(target).vocab_size
    actions = workload(dp, dp, REQUESTS, vocab=vocab, horizon=6, max_prompt_tokens=30, max_new_tokens=10)
    case = Case(config(target, draft or draft_folder(target), **config_settings), actions)
    tally = check(ranks(case.world_size), case)
    print(f"{mesh}, {shape}: {tally}")
    assert not tally.mismatches, tally.mismatches
    assert tally.compared_requests == tally.compared_trees == REQUESTS
    return tally


@pytest.mark.parametrize(("mesh", "shape"), [("two, by counts", "tree"), ("two ranks that have all rows", "chain")])
def test_five_experts_on_two_ranks_match_one_rank(ranks: RanksFactory, mesh: str, shape: str) -> None:
    tally = check_on_mesh(ranks, family_checkpoint(*FIVE_EXPERT_TARGET).folder, mesh, shape)
    assert "all rows" in mesh or tally.idle_rank_steps > 0, "no rank was without rows in a step of the others"


@pytest.mark.slow
@pytest.mark.parametrize("family", MOE_FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_moe_families_on_each_expert_mesh_match_one_rank(ranks: RanksFactory, mesh: str, family: str) -> None:
    """Each family runs on each mesh. The configs of a family take turns over the meshes. Chain and tree take turns too,
    so that each mesh and each family runs both.
    """
    cases = list(FAMILIES[family].cases)
    turn = list(MESHES).index(mesh)
    shape = list(SHAPES)[(turn + MOE_FAMILIES.index(family)) % 2]
    check_on_mesh(ranks, family_checkpoint(family, cases[turn % len(cases)]).folder, mesh, shape)


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("mesh", MESHES)
def test_moe_drafts_on_each_expert_mesh_match_one_rank(ranks: RanksFactory, mesh: str, draft: str) -> None:
    """Two targets take turns: one without experts, and one with another number of experts than the draft. Chain and
    tree take turns as well.
    """
    turn = list(MESHES).index(mesh) + DRAFTS.index(draft)
    dense, shape = turn % 2 == 0, list(SHAPES)[turn // 2 % 2]
    target, folder = (
        target_folder(spread=0.015) if dense else family_checkpoint(*FIVE_EXPERT_TARGET).folder,
        draft_of(draft),
    )
    spec = check_draft(folder, read_target(target))
    tally = check_on_mesh(ranks, target, mesh, shape, folder, speculative_algorithm=algorithm_of(spec))
    assert not dense or sum(tally.trees_by_accept_length[j] for j in tally.trees_by_accept_length if j) > 0


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["two, by counts", "four, two to a part"])
def test_replicated_moe_draft_matches_one_rank(ranks: RanksFactory, mesh: str) -> None:
    target, folder = family_checkpoint(*FIVE_EXPERT_TARGET).folder, draft_of("nextn-sparse")
    algorithm = algorithm_of(check_draft(folder, read_target(target)))
    overrides = {"speculative_algorithm": algorithm, "speculative_draft_parallel": "replicated"}
    check_on_mesh(ranks, target, mesh, "tree", folder, **overrides)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["two, by counts", "two ranks that have all rows"])
@pytest.mark.parametrize("kind", ["fp8 tensor", "fp8 block", "int8 zeros", "int4", "awq", "gptq", "mxfp4"])
def test_quantised_experts_on_two_ranks_match_one_rank(ranks: RanksFactory, kind: str, mesh: str) -> None:
    """Three experts on two ranks; a rank reads each of its experts completely."""
    folder = packed_experts()[0] if kind == "mxfp4" else quantised(kind, experts=True)[0]
    check_on_mesh(ranks, folder, mesh, "tree")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["two, by counts", "two, to all", "four in two groups"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_captured_expert_parallel_steps_match_one_rank(ranks: RanksFactory, family: str, mesh: str) -> None:
    """A captured step sends its rows to all ranks, because it must not read row counts on the host. Other steps send
    rows by counts.
    """
    target = family_checkpoint(family, next(iter(FAMILIES[family].cases))).folder
    config_settings = MESHES[mesh] | SHAPES["tree"] | {"capture": "on", "capture_sizes": [1, 2, 4, 8]}
    dp = config_settings["attn_dp_size"]
    actions = workload(5, dp, 30, vocab=VOCAB, horizon=50, max_prompt_tokens=30, max_new_tokens=14)
    case = Case(config(target, draft_folder(target), **config_settings), actions)
    tally = check(ranks(case.world_size), case)
    print(f"{mesh}: {tally}")
    assert not tally.mismatches and tally.replayed_steps > 10, tally


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "mesh"), [("float32", "two, by counts"), ("bfloat16", "four in two groups")])
def test_expert_parallel_requests_finish_in_lower_precision(ranks: RanksFactory, dtype: str, mesh: str) -> None:
    target = family_checkpoint("deepseek_v3", "low-rank queries").folder
    config_settings = MESHES[mesh] | SHAPES["tree"] | {"dtype": dtype, "debug_lockstep": True}
    actions = workload(5, 2, 12, vocab=VOCAB, horizon=10, max_prompt_tokens=30, max_new_tokens=14)
    case = Case(config(target, draft_folder(target), **config_settings), actions)
    reports = ranks(case.world_size).run_without_failure(case)
    assert {name for report in reports for name in report.ended} == {a.request["request_id"] for a in actions}
