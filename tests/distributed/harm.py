"""`FaultInjector`: the tool by which a planted divergence changes its rank at one step, and by which all is undone."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from cluster.config.tree_shape import TreeShape
from cluster.dp_attention.facts import RankFacts
from cluster.dp_attention.plan import PlanRule, StepPlan
from cluster.engine import Rank, lockstep


class FaultInjector:
    """Injects one planted fault into one rank. The fault triggers once, in step `at_step` or later.

    When it triggers, `on_triggered(step)` is called.
    """

    def __init__(self, rank: Rank, at_step: int, on_triggered: Callable[[int], None]) -> None:
        self.lockstep, self.mesh = rank.lockstep, rank.lockstep.mesh
        self.exchange, self.coordinator, self.step = (
            rank.lockstep.exchange,
            rank.lockstep.coordinator,
            rank.lockstep.step,
        )
        self._at_step, self._on_triggered, self._triggered = at_step, on_triggered, False
        self._original_attributes: list[tuple[Any, str, Any]] = []

    def replace_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Replace the attribute `name` of `owner`, until `undo`."""
        self._original_attributes.append((owner, name, vars(owner).get(name, FaultInjector)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore all replaced attributes."""
        for owner, name, value in reversed(self._original_attributes):
            if value is FaultInjector:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    def triggers_at(self, step: int) -> bool:
        """Return whether the fault triggers in `step`. It triggers once: after True every call returns False."""
        if self._triggered or step < self._at_step:
            return False
        self._triggered = True
        self._on_triggered(step)
        return True

    def replace_exchange_call(self, op: str, phase: str, faulty: Callable[..., Tensor]) -> None:
        """Replace one call of the exchange: the first `op` in `phase`, from step `at_step` on.

        `faulty(original, *args)` is called in place of `original(*args)`.
        """
        original = getattr(self.exchange, op)

        def call(*args: Any) -> Tensor:
            script = self.exchange._script
            is_matching_call = script and (script[0].op, script[0].phase) == (op, phase)
            result: Tensor = (
                faulty(original, *args)
                if is_matching_call and self.triggers_at(self.exchange._step)
                else original(*args)
            )
            return result

        self.replace_attribute(self.exchange, op, call)

    def before_agreement(self, change: Callable[[], None]) -> None:
        """Call `change` once, before the ranks agree on a step."""
        original = self.coordinator.header

        def header() -> RankFacts:
            if self.triggers_at(self.coordinator.step):
                change()
            return original()

        self.replace_attribute(self.coordinator, "header", header)

    def replace_step(self, faulty: Callable[..., Any]) -> None:
        """Replace the run of one step: call `faulty(original, batch, shape)` in place of `original(batch, shape)`."""
        original = self.step.run

        def run(batch: Any, shape: TreeShape) -> Any:
            return faulty(original, batch, shape) if self.triggers_at(self.exchange._step) else original(batch, shape)

        self.replace_attribute(self.step, "run", run)

    def replace_unpacked_input(self, faulty: Callable[[Any], Any]) -> None:
        """On a follower, change one step input that the leader sent. `faulty(step_input)` returns the changed step
        input, or None if it cannot change this one; then the fault waits for the next.
        """
        original = lockstep.unpack

        def unpack(packed: list[int]) -> Any:
            step_input = original(packed)
            changed = faulty(step_input) if self.exchange._step >= self._at_step else None
            return step_input if changed is None or not self.triggers_at(self.exchange._step) else changed

        self.replace_attribute(lockstep, "unpack", unpack)


Plant = Callable[[FaultInjector], None]
"""A planted divergence: a function that changes the rank of an injector."""


def plant_plan(change: Callable[[StepPlan], StepPlan]) -> Plant:
    """A plant: the plan rule gives this rank another plan than its peers, from the same facts."""

    def plant(injector: FaultInjector) -> None:
        original = PlanRule.plan

        def plan(rule: PlanRule, table: Any, shape: TreeShape, *rest: Any) -> StepPlan:
            original_plan = original(rule, table, shape, *rest)
            return (
                change(original_plan)
                if change(original_plan) != original_plan and injector.triggers_at(original_plan.step)
                else original_plan
            )

        injector.replace_attribute(PlanRule, "plan", plan)

    return plant


def plant_call(op: str, phase: str, faulty: Callable[..., Any]) -> Plant:
    """A plant: `faulty(original, *args)` replaces one call `op` of the exchange in `phase`."""
    return lambda injector: injector.replace_exchange_call(op, phase, faulty)


def call_twice(original: Callable[..., Any], *args: Any) -> Any:
    original(*args)
    return original(*args)


def plant_before_agreement(change: Callable[[FaultInjector], None]) -> Plant:
    """A plant: `change` changes the rank once, before the ranks agree on a step."""
    return lambda injector: injector.before_agreement(lambda: change(injector))
