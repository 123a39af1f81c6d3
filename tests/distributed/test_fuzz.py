"""With random arrivals, lengths, aborts, chunk sizes and tiers on every rank, a gang never hangs and stays in step."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.compare import Tally
from tests.distributed.fuzz import fuzz, random_case
from tests.distributed.gang import Case, RankProcesses

RanksFactory = Callable[[int], RankProcesses]
STEPS_BY_RANK_COUNT = {2: 3_000, 4: 2_000}  # number of ranks -> steps of both meshes together


def run(ranks: RanksFactory, tp: int, dp: int, steps: int, first_seed: int) -> Tally:
    started_at = time.monotonic()
    total = fuzz(ranks(tp), dp, steps, first_seed)
    print(f"tp{tp}/dp{dp}: {total} in {time.monotonic() - started_at:.0f} s")
    return total


def test_fuzz_case_is_determined_by_its_seed_and_mesh() -> None:
    assert random_case(3, 2, 2) == random_case(3, 2, 2)
    for other in (random_case(4, 2, 2), random_case(3, 4, 2), random_case(3, 2, 1)):
        assert other.actions != random_case(3, 2, 2).actions
        assert drawn_settings(other) != drawn_settings(random_case(3, 2, 2))


def drawn_settings(case: Case) -> dict[str, Any]:
    """Return the settings of a case without the sizes of its mesh, by which any two meshes differ."""
    return {name: value for name, value in case.config.items() if name not in ("tp_size", "attn_dp_size")}


@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_ranks_stay_in_step_under_random_load(ranks: RanksFactory, dp: int) -> None:
    total = run(ranks, 2, dp, 120, first_seed=1)
    assert total.compared_requests > 10 and total.aborted_requests > 0
    assert dp == 1 or total.uneven_steps > total.steps / 3


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_ranks_stay_in_step_over_thousands_of_random_steps(ranks: RanksFactory, tp: int, dp: int) -> None:
    """Each of the two meshes of a number of ranks takes half of the steps in `STEPS_BY_RANK_COUNT`."""
    total = run(ranks, tp, dp, STEPS_BY_RANK_COUNT[tp] // 2, first_seed=1000)
    assert total.compared_requests > 50 and total.aborted_requests > 10 and total.retractions > 2
    assert dp == 1 or (
        total.padding_rows > 1000 and total.uneven_steps > total.steps / 3 and total.idle_rank_steps > 100
    )
