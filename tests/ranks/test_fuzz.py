"""Random arrivals, lengths, aborts, chunk sizes and tiers on every rank: never a hang, never a step apart."""

import time
from collections.abc import Callable

import pytest

from tests.ranks.compare import Tally
from tests.ranks.fuzz import fuzz, life
from tests.ranks.gang import Ranks

Gangs = Callable[[int], Ranks]
FULL = {2: 4_000, 4: 2_000}  # steps by ranks


def run(gangs: Gangs, tp: int, dp: int, steps: int, first_seed: int) -> Tally:
    began = time.monotonic()
    total = fuzz(gangs(tp), dp, steps, first_seed)
    print(f"tp{tp}/dp{dp}: {total} in {time.monotonic() - began:.0f} s")
    return total


def test_fuzz_case_is_determined_by_its_seed_and_mesh() -> None:
    assert life(3, 2, 2) == life(3, 2, 2)
    assert life(3, 2, 2).actions != life(4, 2, 2).actions and life(3, 2, 2) != life(3, 2, 1)


@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_ranks_stay_in_step_under_random_load(ranks: Gangs, dp: int) -> None:
    total = run(ranks, 2, dp, 200, first_seed=1)
    assert total.compared > 10 and total.aborted > 0
    assert dp == 1 or total.uneven > total.steps / 3


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_ranks_stay_in_step_over_thousands_of_random_steps(ranks: Gangs, tp: int, dp: int) -> None:
    """Together as many steps as `FULL` says, half of them with each mesh."""
    total = run(ranks, tp, dp, FULL[tp] // 2, first_seed=1000)
    assert total.compared > 50 and total.aborted > 10 and total.retracted > 2
    assert dp == 1 or (total.padded > 1000 and total.uneven > total.steps / 3 and total.idle > 100)
