"""A device that runs behind the host, on a CPU: a step runs only when its results are asked for, as late as it can.

Whatever the host does between beginning a step and reading it has then been done to host state alone: a step that
needed a length, a page or a row which the host meanwhile changed would give other tokens.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from cluster.batch import StepInput
from cluster.config.tree_shape import TreeShape
from cluster.dp_attention.plan import StepPlan
from cluster.engine import Engine, Rank, build
from cluster.engine.programs import Programs
from cluster.spec.result import StepOutput

R = TypeVar("R", bound=Rank)


class LatePrograms:
    """Steps that wait in a queue until one of them is read. `owners` are those of the step that runs now; `before` is
    called with its order when the tables are as that says.
    """

    def __init__(self, programs: Programs, rank: Rank) -> None:
        self.assembler, self.step, self._rank = programs.assembler, programs.step, rank
        self._queue: deque[LateOutput] = deque()
        self.owners: dict[int, str] = {}
        self.before: Callable[[StepInput], None] | None = None
        self.checksum = self.eager_fallbacks = 0

    def remove_all(self) -> None:
        """Nothing is captured."""

    def run(self, order: StepInput, plan: StepPlan, shape: TreeShape) -> "LateOutput":
        meant = running(self._rank)

        def late() -> StepOutput:
            self.owners.clear()
            self.owners.update(meant)
            sent = self.assembler.send(order, shape.forced_nodes)
            if self.before is not None:
                with torch.inference_mode():
                    self.before(order)
            return self.step.run(self.assembler.batch(sent, plan.mode, shape.forced_nodes), shape).read()

        output = LateOutput(late, self._queue)
        self._queue.append(output)
        return output


class LateOutput:
    """What a step will have decided."""

    def __init__(self, run: Callable[[], StepOutput], queue: "deque[LateOutput]") -> None:
        self._run, self._queue = run, queue

    def read(self) -> StepOutput:
        assert self._queue.popleft() is self, "steps are read in the order in which they began"
        return self._run()


def running(rank: Rank) -> dict[int, str]:
    """The requests that hold rows, by row, as the host has it now."""
    if not isinstance(rank, Engine):
        return {}
    return {s.lease.row: s.request.request_id for s in rank._parts.scheduler.running if s.lease is not None}


def owners(engine: Engine) -> dict[int, str]:
    """The requests that hold rows, by row, for the step that runs now."""
    programs = engine._parts.lockstep.programs
    return programs.owners if isinstance(programs, LatePrograms) else running(engine)


def delay(rank: R) -> R:
    """Have the host of this rank, which is alone, be a step ahead of a device that runs as late as it can."""
    lockstep: Any = rank.lockstep
    assert lockstep.mesh.world.size == 1, "collectives of ranks that wait for each other cannot be put off"
    lockstep.programs = LatePrograms(lockstep.programs, rank)
    lockstep.max_in_flight = 1
    return rank


def delay_all(patch: pytest.MonkeyPatch) -> None:
    """Have every engine built from now on run like this."""
    true = build.assemble
    patch.setattr(build, "assemble", lambda *given: delay(true(*given)))
