"""Planted divergences of experts that are apart: of the counts that ranks tell, of what they send and take by them."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from cluster.distributed.mesh import Axis
from cluster.dp_attention.all2all import AllToAll
from tests.ranks.harm import Harm, Plant, instead, planned, set_before, twice


def skip(op: str, phase: str) -> Plant:
    """Do not call it, go on with a result of the right shape."""

    def wrong(harm: Harm, first: Any, *_: Any) -> Any:
        call = harm.exchange._script[0]
        if op == "counts":
            return (first.counts,) * harm.mesh.world.size
        if op == "dispatch":
            return first.new_zeros(3, call.width)
        return first.new_zeros(call.rows[harm.mesh.dp_rank], call.width)

    return lambda harm: harm.in_call(op, phase, lambda _, *given: wrong(harm, *given))


def told(change: Callable[[tuple[int, ...]], tuple[int, ...]], more: int = 0) -> Callable[..., Any]:
    """A journey with other counts, of so many rows `more`."""

    def wrong(true: Callable[..., Any], all2all: AllToAll) -> Any:
        other = copy(all2all)
        other.counts, other.num_rows = change(all2all.counts), all2all.num_rows + more
        return true(other)

    return wrong


def shifted(counts: tuple[int, ...]) -> tuple[int, ...]:
    """One row less to the part that has most, one more to another: such as could be, if there is room."""
    at = counts.index(max(counts))
    moved = [count + (part == (at + 1) % len(counts)) - (part == at) for part, count in enumerate(counts)]
    return tuple(moved)


def sent_elsewhere(true: Callable[..., Any], rows: Tensor, table: Any, all2all: AllToAll) -> Any:
    other = copy(all2all)
    other.counts = shifted(all2all.counts)
    return true(rows, table, other)


def not_entered(harm: Harm) -> None:
    """The mesh returns without entering the collective, as if nothing were sent."""
    true = Axis.all_to_all

    def all_to_all(axis: Axis, rows: Tensor, sent: list[int], taken: list[int]) -> Tensor:
        if axis is harm.mesh.world and harm.due(harm.mesh.position[0]):
            return rows.new_zeros(sum(taken), *rows.shape[1:])
        return true(axis, rows, sent, taken)

    harm.put(Axis, "all_to_all", all_to_all)


def sends_to_all(harm: Harm) -> None:
    """Runs a step whose rows go by counts as one whose rows go to all."""

    def run(true: Callable[..., Any], *given: Any) -> Any:
        harm.exchange.routes_to_experts = False
        return true(*given)

    harm.in_run(run)


def back_at_once(harm: Harm) -> None:
    """Sends rows back instead of away."""
    harm.in_call("dispatch", "target", lambda _, rows, table, way: harm.exchange.combine(rows, table, way, None))


OF_EXPERTS: dict[str, Plant] = {
    **{
        f"skips {op}, {phase}": skip(op, phase)
        for phase in ("target", "draft", "extend")
        for op in ("counts", "dispatch", "combine")
    },
    "tells other counts": instead("counts", "target", told(shifted)),
    "tells of more rows than there are": instead("counts", "draft", told(lambda counts: (counts[0] + 99, *counts[1:]))),
    "tells of less rows than there are": instead("counts", "extend", told(lambda counts: (0,) * len(counts))),
    "counts for a part less": instead("counts", "target", told(lambda counts: counts[:-1])),
    "counts of a row more": instead("counts", "extend", told(lambda counts: counts, 1)),
    "sends a row elsewhere": instead("dispatch", "target", sent_elsewhere),
    "one row less to dispatch": instead("dispatch", "target", lambda true, rows, *way: true(rows[:-1], *way)),
    "dispatches rows without ids": instead("dispatch", "draft", lambda true, rows, *way: true(rows[:, :-1], *way)),
    "dispatches in float32": instead("dispatch", "extend", lambda true, rows, *way: true(rows.float(), *way)),
    "one sum less to combine": instead("combine", "target", lambda true, made, *way: true(made[:-1], *way)),
    "combines narrower sums": instead("combine", "draft", lambda true, made, *way: true(made[:, :-1], *way)),
    "all-to-all not entered": not_entered,
    "counts twice": instead("counts", "target", twice),
    "dispatches twice": instead("dispatch", "extend", twice),
    "combines twice": instead("combine", "target", twice),
    "combine before dispatch": back_at_once,
    "rows to all experts": sends_to_all,
    "other rule of experts": set_before(
        lambda harm: setattr(harm.coordinator, "_rule", replace(harm.coordinator._rule, expert_parallel=False))
    ),
    "other plan, counts": planned(lambda plan: plan._replace(routes_to_experts=not plan.routes_to_experts)),
}
"""For a target and a draft with experts, of which each rank holds some; rows go to them by counts."""

QUICK = {
    *(f"skips {op}, target" for op in ("counts", "dispatch", "combine")),
    *("tells other counts", "tells of more rows than there are", "sends a row elsewhere", "one row less to dispatch"),
    *("one sum less to combine", "all-to-all not entered", "rows to all experts", "other plan, counts"),
}
"""Those of every run of the tests; the others are slow together."""
