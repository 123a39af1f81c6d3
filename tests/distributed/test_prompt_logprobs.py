"""Several ranks give the prompt log-probabilities of a single rank, whichever ranks hold the columns of the head."""

import pytest

from tests.distributed.compare import Tally
from tests.distributed.test_parity import RanksFactory
from tests.distributed.test_penalties_and_grammars import tally_with_params
from tests.distributed.workload import SCORED
from tests.support.pairwise import covering

MESHES = ((2, 1), (2, 2), (4, 2))
SHARDS = ("attention", "world")
SHAPES: tuple[dict[str, object], ...] = (
    {"topk": 1, "num_steps": 5, "shaken": 3},
    {"topk": 3, "draft_vocab": 17, "max_total_tokens": 96},
    {"topk": 3, "dp_padding": "padded", "shaken": 4},
    {"topk": 1, "capture": "on", "capture_sizes": [1, 2, 4, 8, 16]},
)


def tally_of(ranks: RanksFactory, mesh: tuple[int, int], shards: str, **settings: object) -> Tally:
    return tally_with_params(ranks, mesh, SCORED, vocab_parallel=shards, **settings)


@pytest.mark.parametrize(("mesh", "shards"), [((2, 1), "attention"), ((2, 2), "world"), ((2, 2), "attention")])
def test_prompt_logprobs_on_several_ranks_match_one_rank(
    ranks: RanksFactory, mesh: tuple[int, int], shards: str
) -> None:
    tally = tally_of(ranks, mesh, shards, debug_lockstep=True)
    assert not tally.mismatches, tally.mismatches
    assert tally.compared_requests > 15 and tally.compared_prompt_logprobs > 10, tally


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "shards", "shape"), covering([MESHES, SHARDS, SHAPES]))
def test_prompt_logprobs_on_all_meshes_match_one_rank(
    ranks: RanksFactory, mesh: tuple[int, int], shards: str, shape: dict[str, object]
) -> None:
    tally = tally_of(ranks, mesh, shards, **shape)
    assert not tally.mismatches, tally.mismatches
    assert tally.compared_requests > 12 and tally.compared_prompt_logprobs > 8, tally
