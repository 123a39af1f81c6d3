"""A device that runs behind the host, on a CPU: a step runs only when its results are asked for, as late as it can.

Whatever the host does between beginning a step and reading it has then been done to host state alone: a step that
needed a length, a page or a row which the host meanwhile changed would give other tokens.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from cluster.batch import Order
from cluster.config import TreeShape
from cluster.engine import Engine, build
from cluster.engine.assembler import Assembler
from cluster.engine.rank import Rank
from cluster.spec.result import Decided
from cluster.spec.step import Step

R = TypeVar("R", bound=Rank)


class LateAssembler:
    """Passes orders on as they are; a step assembles its batch when it runs."""

    def __init__(self, assembler: Assembler) -> None:
        self._assembler = assembler

    def batch(self, order: Order) -> Order:
        return order

    def __getattr__(self, name: str) -> Any:
        return getattr(self._assembler, name)


class LateStep:
    """A step whose runs wait in a queue until one of them is read. `owners` are those of the step that runs now;
    `before` is called with its order.
    """

    def __init__(self, step: Step, assembler: Assembler, rank: Rank) -> None:
        self.__dict__.update(_true=step, _assembler=assembler, _rank=rank, _queue=deque(), owners={}, before=None)

    def run(self, order: Order, shape: TreeShape) -> "LateOutput":
        meant = running(self._rank)

        def late() -> Decided:
            self.owners.clear()
            self.owners.update(meant)
            batch = self._assembler.batch(order)
            if self.before is not None:
                with torch.inference_mode():
                    self.before(order)
            return self._true.run(batch, shape).read()

        output = LateOutput(late, self._queue)
        self._queue.append(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._true, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "before":
            self.__dict__[name] = value
        else:
            setattr(self._true, name, value)


class LateOutput:
    """What a step will have decided."""

    def __init__(self, run: Callable[[], Decided], queue: "deque[LateOutput]") -> None:
        self._run, self._queue = run, queue

    def read(self) -> Decided:
        assert self._queue.popleft() is self, "steps are read in the order in which they began"
        return self._run()


def running(rank: Rank) -> dict[int, str]:
    """The requests that hold rows, by row, as the host has it now."""
    if not isinstance(rank, Engine):
        return {}
    return {s.lease.row: s.request.request_id for s in rank._p.scheduler.running if s.lease is not None}


def owners(engine: Engine) -> dict[int, str]:
    """The requests that hold rows, by row, for the step that runs now."""
    step = engine._p.lockstep.step
    return step.owners if isinstance(step, LateStep) else running(engine)


def delay(rank: R) -> R:
    """Have the host of this rank, which is alone, be a step ahead of a device that runs as late as it can."""
    lockstep: Any = rank._lockstep
    assert lockstep.mesh.world.size == 1, "collectives of ranks that wait for each other cannot be put off"
    lockstep.step = LateStep(lockstep.step, lockstep.assembler, rank)
    lockstep.assembler = LateAssembler(lockstep.assembler)
    lockstep.lag = 1
    return rank


def delay_all(patch: pytest.MonkeyPatch) -> None:
    """Have every engine built from now on run like this."""
    true = build.assemble
    patch.setattr(build, "assemble", lambda *given: delay(true(*given)))
