"""Planted divergences of expert parallelism: of the row counts that ranks exchange, and of the rows that they dispatch
and combine by these counts.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from cluster.distributed.mesh import Axis
from cluster.dp_attention.all2all import AllToAll
from tests.distributed.harm import FaultInjector, Plant, call_twice, plant_before_agreement, plant_call, plant_plan


def skip_call(op: str, phase: str) -> Plant:
    """A plant: the rank skips one call `op` of the exchange, and continues with a made-up result."""

    def faulty(injector: FaultInjector, first_argument: Any, *_: Any) -> Any:
        call = injector.exchange._script[0]
        if op == "counts":
            return (first_argument.counts,) * injector.mesh.world.size
        if op == "dispatch":
            return first_argument.new_zeros(3, call.width)
        return first_argument.new_zeros(call.rows[injector.mesh.dp_rank], call.width)

    return lambda injector: injector.replace_exchange_call(
        op, phase, lambda _, *arguments: faulty(injector, *arguments)
    )


def with_changed_counts(
    change: Callable[[tuple[int, ...]], tuple[int, ...]], extra_rows: int = 0
) -> Callable[..., Any]:
    """A faulty `counts` call: the rank sends `change(counts)`, and claims `extra_rows` more rows than it has."""

    def faulty(original: Callable[..., Any], all2all: AllToAll) -> Any:
        changed = copy(all2all)
        changed.counts, changed.num_rows = change(all2all.counts), all2all.num_rows + extra_rows
        return original(changed)

    return faulty


def move_one_row(counts: tuple[int, ...]) -> tuple[int, ...]:
    """The counts, with one row moved from the part of the experts that has most rows to the next part.

    The result is possible as long as the next part has room for the row.
    """
    largest_part = counts.index(max(counts))
    moved_counts = [
        count + (part == (largest_part + 1) % len(counts)) - (part == largest_part) for part, count in enumerate(counts)
    ]
    return tuple(moved_counts)


def dispatch_with_moved_row(original: Callable[..., Any], rows: Tensor, row_counts: Any, all2all: AllToAll) -> Any:
    """A faulty `dispatch` call: one row goes to another part than this rank's counts said."""
    changed = copy(all2all)
    changed.counts = move_one_row(all2all.counts)
    return original(rows, row_counts, changed)


def skip_all_to_all(injector: FaultInjector) -> None:
    """Return zeros in place of entering an all-to-all over the world."""
    original = Axis.all_to_all

    def all_to_all(axis: Axis, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        if axis is injector.mesh.world and injector.triggers_at(injector.mesh.position[0]):
            return rows.new_zeros(sum(receive_counts), *rows.shape[1:])
        return original(axis, rows, send_counts, receive_counts)

    injector.replace_attribute(Axis, "all_to_all", all_to_all)


def send_rows_to_all(injector: FaultInjector) -> None:
    """Run a step as if all rows went to all experts, though its plan sends rows by counts."""

    def run(original: Callable[..., Any], *arguments: Any) -> Any:
        injector.exchange.routes_to_experts = False
        return original(*arguments)

    injector.replace_step(run)


def combine_instead_of_dispatch(injector: FaultInjector) -> None:
    """Call combine where the script has dispatch."""
    injector.replace_exchange_call(
        "dispatch",
        "target",
        lambda _, rows, row_counts, all2all: injector.exchange.combine(rows, row_counts, all2all, None),
    )


EXPERT_PLANTS: dict[str, Plant] = {
    **{
        f"skips {op}, {phase}": skip_call(op, phase)
        for phase in ("target", "draft", "extend")
        for op in ("counts", "dispatch", "combine")
    },
    "sends other counts": plant_call("counts", "target", with_changed_counts(move_one_row)),
    "sends counts of too many rows": plant_call(
        "counts", "draft", with_changed_counts(lambda counts: (counts[0] + 99, *counts[1:]))
    ),
    "sends counts of too few rows": plant_call(
        "counts", "extend", with_changed_counts(lambda counts: (0,) * len(counts))
    ),
    "sends no count of the last part": plant_call("counts", "target", with_changed_counts(lambda counts: counts[:-1])),
    "counts of a row more": plant_call("counts", "extend", with_changed_counts(lambda counts: counts, 1)),
    "sends a row elsewhere": plant_call("dispatch", "target", dispatch_with_moved_row),
    "one row less to dispatch": plant_call(
        "dispatch", "target", lambda original, rows, *arguments: original(rows[:-1], *arguments)
    ),
    "dispatches rows without ids": plant_call(
        "dispatch", "draft", lambda original, rows, *arguments: original(rows[:, :-1], *arguments)
    ),
    "dispatches in float32": plant_call(
        "dispatch", "extend", lambda original, rows, *arguments: original(rows.float(), *arguments)
    ),
    "one sum less to combine": plant_call(
        "combine", "target", lambda original, outputs, *arguments: original(outputs[:-1], *arguments)
    ),
    "combines narrower sums": plant_call(
        "combine", "draft", lambda original, outputs, *arguments: original(outputs[:, :-1], *arguments)
    ),
    "all-to-all not entered": skip_all_to_all,
    "counts twice": plant_call("counts", "target", call_twice),
    "dispatches twice": plant_call("dispatch", "extend", call_twice),
    "combines twice": plant_call("combine", "target", call_twice),
    "combine before dispatch": combine_instead_of_dispatch,
    "rows to all experts": send_rows_to_all,
    "other rule of experts": plant_before_agreement(
        lambda harm: setattr(harm.coordinator, "_rule", replace(harm.coordinator._rule, expert_parallel=False))
    ),
    "other plan, counts": plant_plan(lambda plan: plan._replace(routes_to_experts=not plan.routes_to_experts)),
}
"""The plants by name. They need a target and a draft with experts, spread over the ranks, and rows sent by counts."""

FAST_EXPERT_PLANTS = {
    *(f"skips {op}, target" for op in ("counts", "dispatch", "combine")),
    *("sends other counts", "sends counts of too many rows", "sends a row elsewhere", "one row less to dispatch"),
    *("one sum less to combine", "all-to-all not entered", "rows to all experts", "other plan, counts"),
}
"""The plants that may run in every run of the tests. All others are marked slow: together they take long."""
