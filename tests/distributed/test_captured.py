"""A gang that replays captured steps gives the tokens of a single rank that captures nothing."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.compare import check
from tests.distributed.gang import Case, RankProcesses
from tests.distributed.test_parity import config
from tests.distributed.workload import workload
from tests.parity.harness import VOCAB, tiny_pair

RanksFactory = Callable[[int], RankProcesses]
EXACT: dict[str, Any] = {"capture": "on"}
SIZED: dict[str, Any] = {"capture": "on", "capture_sizes": [1, 2, 4, 8, 32]}
PADDED = {"dp_padding": "padded"}
SETTINGS = {
    "exact": EXACT,
    "exact, padded": EXACT | PADDED,
    "sized": SIZED,
    "sized, padded": SIZED | PADDED | {"vocab_parallel": "world", "speculative_batch_tiers": {1: 2}},
}
FAST_SETTINGS = ("sized",)


@pytest.mark.parametrize(
    ("tp", "dp"), [pytest.param(2, 1, marks=pytest.mark.slow), (2, 2), pytest.param(4, 2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "settings",
    [pytest.param(own, marks=() if name in FAST_SETTINGS else pytest.mark.slow) for name, own in SETTINGS.items()],
    ids=SETTINGS,
)
def test_ranks_replaying_captured_steps_match_one_eager_rank(
    ranks: RanksFactory, tp: int, dp: int, settings: dict[str, Any]
) -> None:
    actions = workload(7 + tp + dp, dp, 40, vocab=VOCAB, horizon=60, abort_share=0.1)
    tally = check(ranks(tp), Case(config(*tiny_pair(), tp_size=tp, attn_dp_size=dp, **settings), actions))
    print(tally)
    assert not tally.mismatches and tally.compared_requests > 14, tally
    assert tally.replayed_steps > (10 if "capture_sizes" in settings else 0), tally
