"""Simulates, on a CPU, a device that runs behind the host: a step runs only when the host reads its results.

This is the latest possible moment. Between the start of a step and its read, the host changes its own state only. A
step that depends on a length, a page or a row that the host has changed in this time gives other tokens.
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
    """Stands in for `Programs`: started steps wait in a queue, and each runs when its output is read.

    `owners` maps each row to the id of its request, for the step that runs now. `before_step` is called with the
    `StepInput` of a step just before the step runs, after the tables on the device have been updated.
    """

    def __init__(self, programs: Programs, rank: Rank) -> None:
        self.assembler, self.step, self._rank = programs.assembler, programs.step, rank
        self._queue: deque[LateOutput] = deque()
        self.owners: dict[int, str] = {}
        self.before_step: Callable[[StepInput], None] | None = None
        self.checksum = self.capture_us = self.eager_fallbacks = 0

    def remove_all(self) -> None:
        """Do nothing, because no step is captured."""

    def run(self, step_input: StepInput, plan: StepPlan, shape: TreeShape) -> "LateOutput":
        row_owners = running(self._rank)

        def run_step() -> StepOutput:
            self.owners.clear()
            self.owners.update(row_owners)
            staged_inputs = self.assembler.send(step_input, shape.forced_nodes)
            if self.before_step is not None:
                with torch.inference_mode():
                    self.before_step(step_input)
            batch = self.assembler.batch(staged_inputs, plan.mode, shape.forced_nodes, plan.extend_mode)
            return self.step.run(batch, shape).read()

        output = LateOutput(run_step, self._queue)
        self._queue.append(output)
        return output


class LateOutput:
    """The output of a step that has not run yet. `read` runs the step."""

    def __init__(self, run: Callable[[], StepOutput], queue: "deque[LateOutput]") -> None:
        self._run, self._queue = run, queue

    def read(self) -> StepOutput:
        assert self._queue.popleft() is self, "steps must be read in the order in which they were started"
        return self._run()


def running(rank: Rank) -> dict[int, str]:
    """Return the id of the request in each used row, by the current state of the host."""
    if not isinstance(rank, Engine):
        return {}
    return {s.lease.row: s.request.request_id for s in rank._parts.scheduler.running if s.lease is not None}


def owners(engine: Engine) -> dict[int, str]:
    """Return the id of the request in each used row, for the step that runs now."""
    programs = engine._parts.lockstep.programs
    return programs.owners if isinstance(programs, LatePrograms) else running(engine)


def delay(rank: R) -> R:
    """Give the only rank of a world a simulated device that runs each step as late as possible.

    The host is then one step ahead of the device. Return the rank.
    """
    lockstep: Any = rank.lockstep
    assert lockstep.mesh.world.size == 1, "collectives cannot be delayed: the ranks wait for each other"
    lockstep.programs = LatePrograms(lockstep.programs, rank)
    lockstep.max_in_flight = 1
    return rank


def delay_all(patch: pytest.MonkeyPatch) -> None:
    """Apply `delay` to every engine that is built from now on."""
    original_assemble = build.assemble
    patch.setattr(build, "assemble", lambda *args: delay(original_assemble(*args)))
