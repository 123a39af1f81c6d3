"""Adjusted and constrained requests on several ranks: their own group works on each row, wherever its columns are."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.pairwise import covering
from tests.parity.harness import VOCAB, tiny_pair
from tests.ranks.compare import Tally, check
from tests.ranks.gang import Case, Life
from tests.ranks.test_parity import Gangs, config
from tests.ranks.workload import ADJUSTED, CONSTRAINED, workload
from tests.tiny import draft_folder

MESHES = ((2, 1), (2, 2), (4, 2))
SHARDS = (("attention", "world"), ("sharded", "replicated"))
SHAPES = ({"topk": 1, "num_steps": 5}, {"topk": 3, "draft_vocab": 17, "max_total_tokens": 96})


def tally_of(ranks: Gangs, mesh: tuple[int, int], shards: tuple[str, str], **settings: object) -> Tally:
    given = {"vocab_parallel": shards[0], "speculative_draft_parallel": shards[1]}
    return tally_besides(ranks, mesh, (*ADJUSTED, *CONSTRAINED), **given, **settings)


def tally_besides(
    ranks: Gangs, mesh: tuple[int, int], besides: Sequence[dict[str, Any]], shaken: int | None = None, **settings: Any
) -> Tally:
    """A gang against one rank; requests ask for what is `besides` by turns. `shaken`: random chunks and tiers.

    `settings` may name the size of a draft's vocabulary.
    """
    target, draft = tiny_pair()
    if "draft_vocab" in settings:
        draft = draft_folder(target, draft_vocab=settings.pop("draft_vocab"))
    tp, dp = mesh
    actions = workload(tp + dp, dp, 20, vocab=VOCAB, horizon=10, aborts=0.1, besides=besides)
    case = Case(config(target, draft, tp_size=tp, attn_dp_size=dp, **settings), actions, shaken=shaken)
    return check(ranks(tp), case, same_trees=shaken is None)


@pytest.mark.parametrize(("mesh", "shards"), [((2, 1), ("attention", "sharded")), ((2, 2), ("world", "sharded"))])
def test_penalties_and_grammars_on_several_ranks_match_one_rank(
    ranks: Gangs, mesh: tuple[int, int], shards: tuple[str, str]
) -> None:
    tally = tally_of(ranks, mesh, shards, debug_lockstep=True)
    assert not tally.mismatches, tally.mismatches
    assert tally.compared > 15 and sum(tally.accepted[j] for j in tally.accepted if j) > 3, tally


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "vocab", "draft", "shape"), covering([MESHES, *SHARDS, SHAPES], 3))
def test_penalties_and_grammars_on_all_meshes_match_one_rank(
    ranks: Gangs, mesh: tuple[int, int], vocab: str, draft: str, shape: dict[str, int]
) -> None:
    tally = tally_of(ranks, mesh, (vocab, draft), **shape)
    assert not tally.mismatches, tally.mismatches
    assert tally.compared > 12, tally


@pytest.mark.parametrize("more", [{"temperature": 0.0}, {}], ids=["greedy", "sampled too"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_constrained_requests_finish_on_two_ranks_in_lower_precision(
    ranks: Gangs, dtype: str, more: dict[str, float]
) -> None:
    """Over shards of the draft's columns, with nothing that would bring the logits to another dtype."""
    target, draft = tiny_pair()
    actions = workload(3, 1, 12, vocab=VOCAB, horizon=10, besides=[one | more for one in CONSTRAINED[:4]])
    case = Case(config(target, draft, tp_size=2, attn_dp_size=1, dtype=dtype, debug_lockstep=True), actions)
    lives: list[Life] = ranks(2).lives(case)
    assert {name for life in lives for name in life.ended} == {action.request["request_id"] for action in actions}
    assert lives[0].world_log == lives[1].world_log
