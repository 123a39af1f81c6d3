"""When and where a plant does its harm in the rank it was given, and how all of it is taken back."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from cluster.config.tree_shape import TreeShape
from cluster.dp_attention.plan import PlanRule, RankFacts, StepPlan
from cluster.engine import Rank, lockstep


class Harm:
    """One plant in one rank: due from step `at_step` on, once; `struck(step)` is told when."""

    def __init__(self, rank: Rank, at_step: int, struck: Callable[[int], None]) -> None:
        self.lockstep, self.mesh = rank.lockstep, rank.lockstep.mesh
        self.exchange, self.coordinator, self.step = (
            rank.lockstep.exchange,
            rank.lockstep.coordinator,
            rank.lockstep.step,
        )
        self._at_step, self._struck, self._done = at_step, struck, False
        self._kept: list[tuple[Any, str, Any]] = []

    def put(self, where: Any, name: str, value: Any) -> None:
        """Replace an attribute, until `undo`."""
        self._kept.append((where, name, vars(where).get(name, Harm)))
        setattr(where, name, value)

    def undo(self) -> None:
        for where, name, value in reversed(self._kept):
            if value is Harm:
                delattr(where, name)
            else:
                setattr(where, name, value)

    def due(self, step: int) -> bool:
        """Whether it is time; when so it counts as done, once."""
        if self._done or step < self._at_step:
            return False
        self._done = True
        self._struck(step)
        return True

    def in_call(self, op: str, phase: str, wrong: Callable[..., Tensor]) -> None:
        """In the first `op` of `phase` call `wrong(true, *args)` in the place of `true(*args)`."""
        true = getattr(self.exchange, op)

        def call(*args: Any) -> Tensor:
            script = self.exchange._script
            here = script and (script[0].op, script[0].phase) == (op, phase)
            result: Tensor = wrong(true, *args) if here and self.due(self.exchange._step) else true(*args)
            return result

        self.put(self.exchange, op, call)

    def before_agreement(self, change: Callable[[], None]) -> None:
        """Call `change` before the ranks agree on a step."""
        true = self.coordinator.header

        def header() -> RankFacts:
            if self.due(self.coordinator.step):
                change()
            return true()

        self.put(self.coordinator, "header", header)

    def in_run(self, wrong: Callable[..., Any]) -> None:
        """In a step call `wrong(true, batch, shape)` in the place of the true step."""
        true = self.step.run

        def run(batch: Any, shape: TreeShape) -> Any:
            return wrong(true, batch, shape) if self.due(self.exchange._step) else true(batch, shape)

        self.put(self.step, "run", run)

    def in_unpacked(self, wrong: Callable[[Any], Any]) -> None:
        """On a follower, change an order that it got; `wrong` gives None for one that it cannot change."""
        true = lockstep.unpack

        def unpack(words: list[int]) -> Any:
            order = true(words)
            changed = wrong(order) if self.exchange._step >= self._at_step else None
            return order if changed is None or not self.due(self.exchange._step) else changed

        self.put(lockstep, "unpack", unpack)


Plant = Callable[[Harm], None]


def planned(change: Callable[[StepPlan], StepPlan]) -> Plant:
    """The rule gives this rank another plan than its peers, of the same facts."""

    def plant(harm: Harm) -> None:
        true = PlanRule.plan

        def plan(rule: PlanRule, table: Any, shape: TreeShape) -> StepPlan:
            made = true(rule, table, shape)
            return change(made) if change(made) != made and harm.due(made.step) else made

        harm.put(PlanRule, "plan", plan)

    return plant


def instead(op: str, phase: str, wrong: Callable[..., Any]) -> Plant:
    return lambda harm: harm.in_call(op, phase, wrong)


def twice(true: Callable[..., Any], *args: Any) -> Any:
    true(*args)
    return true(*args)


def set_before(change: Callable[[Harm], None]) -> Plant:
    return lambda harm: harm.before_agreement(lambda: change(harm))
