"""Log-probabilities of prompts on several ranks are those of one, wherever the columns of the head are."""

import pytest

from tests.pairwise import covering
from tests.ranks.compare import Tally
from tests.ranks.test_parity import Gangs
from tests.ranks.test_penalties_and_grammars import tally_besides
from tests.ranks.workload import SCORED

MESHES = ((2, 1), (2, 2), (4, 2))
SHARDS = ("attention", "world")
SHAPES: tuple[dict[str, object], ...] = (
    {"topk": 1, "num_steps": 5, "shaken": 3},
    {"topk": 3, "draft_vocab": 17, "max_total_tokens": 96},
    {"topk": 3, "dp_padding": "padded", "shaken": 4},
    {"topk": 1, "capture": "on", "capture_sizes": [1, 2, 4, 8, 16]},
)


def tally_of(ranks: Gangs, mesh: tuple[int, int], shards: str, **settings: object) -> Tally:
    return tally_besides(ranks, mesh, SCORED, vocab_parallel=shards, **settings)


@pytest.mark.parametrize(("mesh", "shards"), [((2, 1), "attention"), ((2, 2), "world"), ((2, 2), "attention")])
def test_prompt_logprobs_on_several_ranks_match_one_rank(ranks: Gangs, mesh: tuple[int, int], shards: str) -> None:
    tally = tally_of(ranks, mesh, shards, debug_lockstep=True)
    assert not tally.mismatches, tally.mismatches
    assert tally.compared > 15 and tally.scored > 10, tally


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "shards", "shape"), covering([MESHES, SHARDS, SHAPES]))
def test_prompt_logprobs_on_all_meshes_match_one_rank(
    ranks: Gangs, mesh: tuple[int, int], shards: str, shape: dict[str, object]
) -> None:
    tally = tally_of(ranks, mesh, shards, **shape)
    assert not tally.mismatches, tally.mismatches
    assert tally.compared > 12 and tally.scored > 8, tally
