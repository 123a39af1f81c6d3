"""Requests with penalties and grammars on several ranks. A request's own attention group adjusts the request's rows,
whichever ranks hold the columns of the logits.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.distributed.compare import Tally, check
from tests.distributed.gang import Case, RankReport
from tests.distributed.test_parity import RanksFactory, config
from tests.distributed.workload import ADJUSTED, CONSTRAINED, workload
from tests.parity.harness import VOCAB, tiny_pair
from tests.support.pairwise import covering
from tests.support.tiny_checkpoints import draft_folder

MESHES = ((2, 1), (2, 2), (4, 2))
SHARDS = (("attention", "world"), ("sharded", "replicated"))
SHAPES = ({"topk": 1, "num_steps": 5}, {"topk": 3, "draft_vocab": 17, "max_total_tokens": 96})


def tally_of(ranks: RanksFactory, mesh: tuple[int, int], shards: tuple[str, str], **settings: object) -> Tally:
    shard_settings = {"vocab_parallel": shards[0], "speculative_draft_parallel": shards[1]}
    return tally_with_params(ranks, mesh, (*ADJUSTED, *CONSTRAINED), **shard_settings, **settings)


def tally_with_params(
    ranks: RanksFactory,
    mesh: tuple[int, int],
    extra_params: Sequence[dict[str, Any]],
    shaken: int | None = None,
    **settings: Any,
) -> Tally:
    """Compare a gang with a single rank; return the tally. Requests get the parameters of `extra_params` in turn.

    `shaken` is the seed of random chunk sizes and tiers; None leaves both as they are. `settings` may also have
    `draft_vocab`, the size of the draft's vocabulary.
    """
    target, draft = tiny_pair()
    if "draft_vocab" in settings:
        draft = draft_folder(target, draft_vocab=settings.pop("draft_vocab"))
    tp, dp = mesh
    actions = workload(tp + dp, dp, 20, vocab=VOCAB, horizon=10, abort_share=0.1, extra_params=extra_params)
    case = Case(config(target, draft, tp_size=tp, attn_dp_size=dp, **settings), actions, shaken=shaken)
    return check(ranks(tp), case, same_trees=shaken is None)


@pytest.mark.parametrize(("mesh", "shards"), [((2, 1), ("attention", "sharded")), ((2, 2), ("world", "sharded"))])
def test_penalties_and_grammars_on_several_ranks_match_one_rank(
    ranks: RanksFactory, mesh: tuple[int, int], shards: tuple[str, str]
) -> None:
    tally = tally_of(ranks, mesh, shards, debug_lockstep=True)
    assert not tally.mismatches, tally.mismatches
    assert (
        tally.compared_requests > 15
        and sum(tally.trees_by_accept_length[j] for j in tally.trees_by_accept_length if j) > 3
    ), tally


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "vocab", "draft", "shape"), covering([MESHES, *SHARDS, SHAPES], 3))
def test_penalties_and_grammars_on_all_meshes_match_one_rank(
    ranks: RanksFactory, mesh: tuple[int, int], vocab: str, draft: str, shape: dict[str, int]
) -> None:
    tally = tally_of(ranks, mesh, (vocab, draft), **shape)
    assert not tally.mismatches, tally.mismatches
    assert tally.compared_requests > 12, tally


@pytest.mark.parametrize("param_overrides", [{"temperature": 0.0}, {}], ids=["greedy", "sampled too"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_constrained_requests_finish_on_two_ranks_in_lower_precision(
    ranks: RanksFactory, dtype: str, param_overrides: dict[str, float]
) -> None:
    """The columns of the draft's head are sharded, and no request has a parameter that changes the dtype of logits."""
    target, draft = tiny_pair()
    actions = workload(
        3,
        1,
        12,
        vocab=VOCAB,
        horizon=10,
        extra_params=[grammar_params | param_overrides for grammar_params in CONSTRAINED[:4]],
    )
    case = Case(config(target, draft, tp_size=2, attn_dp_size=1, dtype=dtype, debug_lockstep=True), actions)
    reports: list[RankReport] = ranks(2).run_without_failure(case)
    assert {name for report in reports for name in report.ended} == {action.request["request_id"] for action in actions}
    assert reports[0].world_log == reports[1].world_log
