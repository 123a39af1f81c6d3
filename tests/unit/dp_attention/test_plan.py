"""The plan is a pure function of the gathered table, and the coordinator compares headers before anything moves."""

from itertools import product

import pytest

from cluster.dp_attention.coordinator import Coordinator, OutOfStepError
from cluster.dp_attention.plan import Facts, make_plan
from cluster.mesh import Mesh


class FakeMesh(Mesh):
    """A world in which the other ranks' rows are given."""

    def __init__(self, rank: int, others: list[tuple[int, ...]]) -> None:
        super().__init__(rank, len(others) + 1)
        object.__setattr__(self, "others", others)

    def all_gather_row(self, row: tuple[int, ...]) -> list[tuple[int, ...]]:
        rows: list[tuple[int, ...]] = list(self.others)  # type: ignore[attr-defined]
        return [*rows[: self.rank], row, *rows[self.rank :]]


def test_the_plan_follows_from_the_table_alone() -> None:
    rows = [Facts(1, 7, 99, *sizes) for sizes in product((0, 3), (0, 5), (1, 4))]
    plan = make_plan(rows)
    assert plan == make_plan(list(rows))
    assert plan.digest == make_plan(tuple(rows)).digest
    assert plan.decodes == tuple(f.decodes for f in rows)
    assert (plan.padded_decodes, plan.padded_prompt_rows, plan.num_steps, plan.step) == (3, 5, 1, 7)


def test_every_number_of_the_plan_is_in_its_digest() -> None:
    base = [Facts(0, 2, 5, 3, 4, 5), Facts(0, 2, 5, 1, 0, 3)]
    digests = {make_plan(base).digest}
    for changed in (
        [Facts(0, 3, 5, 3, 4, 5), Facts(0, 3, 5, 1, 0, 3)],
        [Facts(0, 2, 5, 2, 4, 5), base[1]],
        [Facts(0, 2, 5, 3, 5, 5), base[1]],
        [base[0], Facts(0, 2, 5, 1, 0, 2)],
        [base[1], base[0]],
    ):
        digests.add(make_plan(changed).digest)
    assert len(digests) == 6


def test_an_idle_rank_is_a_rank_with_no_rows() -> None:
    plan = make_plan([Facts(0, 0, 0, 0, 0, 3), Facts(0, 0, 0, 0, 0, 3)])
    assert (plan.padded_decodes, plan.padded_prompt_rows) == (0, 0)


def test_a_world_of_one_steps_on() -> None:
    coordinator = Coordinator(Mesh())
    plans = [coordinator.agree(2, n, 3) for n in range(3)]
    assert [plan.step for plan in plans] == [0, 1, 2]
    assert [plan.prompt_rows for plan in plans] == [(0,), (1,), (2,)]


def test_two_ranks_make_the_same_plan() -> None:
    mine, theirs = Facts(0, 0, 0, 2, 9, 5), Facts(0, 0, 0, 4, 0, 3)
    first = Coordinator(FakeMesh(0, [theirs])).agree(2, 9, 5)
    second = Coordinator(FakeMesh(1, [mine])).agree(4, 0, 3)
    assert first == second
    assert first.decodes == (2, 4)
    assert first.num_steps == 3


@pytest.mark.parametrize(
    ("facts", "field"),
    [(Facts(8, 0, 0, 1, 1, 1), "epoch"), (Facts(0, 4, 0, 1, 1, 1), "step"), (Facts(0, 0, 3, 1, 1, 1), "digest")],
)
def test_a_rank_out_of_step_is_named(facts: Facts, field: str) -> None:
    with pytest.raises(OutOfStepError, match=f"rank 1 is at {field}"):
        Coordinator(FakeMesh(0, [facts])).agree(1, 1, 1)
