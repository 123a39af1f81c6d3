"""A device that takes a fixed time for each step, in place of a rank's step: what is left is what the host does.

It is told what to run and goes on alone, as a GPU does; whoever reads a step's results waits until that step is over.
What a step takes from the host is sent for real. Its tokens mean nothing, and every tree loses its last level.
"""

import time
from collections.abc import Iterable
from typing import Any

from cluster.batch import StepInput
from cluster.config.tree_shape import TreeShape
from cluster.dp_attention.plan import ScriptCall, StepPlan
from cluster.engine.assembler import Assembler
from cluster.engine.rank import Rank
from cluster.observability.metrics import DEVICE_PHASES
from cluster.spec.result import StepDecisions

TOKEN = 7


class SimulatedDevice:
    """Stands for `Programs`. `gaps` are seconds in which it had nothing to do before each step that only decodes `full`
    requests, `waited` the seconds that the host waited for it after each such step, `sent` those that the host took to
    assemble it.
    """

    checksum = 0
    """Of captured programs, of which there are none."""
    launched_anew = 0

    def __init__(self, assembler: Assembler, step_s: float, full: int) -> None:
        self.assembler = assembler
        self.gaps: list[float] = []
        self.waited: list[float] = []
        self.sent: list[float] = []
        self._step_s, self._full, self._free = step_s, full, 0.0

    def drop(self) -> None:
        """There are no captured programs."""

    def run(self, order: StepInput, plan: StepPlan, shape: TreeShape) -> "SimulatedOutput":
        """Queue a step."""
        began = time.perf_counter()
        inputs, finals = self.assembler.send(order, shape.forced), sum(chunk.final for chunk in order.chunks)
        now = time.perf_counter()
        counts = inputs.decodes, finals, sum(chunk.stop - chunk.start for chunk in order.chunks)
        steady = counts == (self._full, 0, 0)
        if steady:
            self.gaps.append(max(0.0, now - self._free))
            self.sent.append(now - began)
        self._free = max(now, self._free) + self._step_s
        return SimulatedOutput(self, self._free, counts, shape.num_steps, steady)


class SimulatedOutput:
    """Stands for a `StepOutput`."""

    def __init__(
        self, device: SimulatedDevice, over: float, counts: tuple[int, int, int], num_steps: int, steady: bool
    ) -> None:
        self._device, self._over, self._counts, self._num_steps, self._steady = device, over, counts, num_steps, steady

    def read(self) -> StepDecisions:
        """Wait until the step is over."""
        left = self._over - time.perf_counter()
        if left > 0:
            time.sleep(left)
        if self._steady:
            self._device.waited.append(max(0.0, left))
        requests, finals, rows = self._counts
        width = self._num_steps + 1
        return StepDecisions(
            tokens=[[TOKEN] * width] * requests,
            accept_len=[max(1, self._num_steps)] * requests,
            finite=[width] * requests,
            first=[TOKEN] * finals,
            sound=[True] * rows,
            logprobs=None,
            seconds=dict.fromkeys(DEVICE_PHASES, 0.0),
        )


class NoScript:
    """Stands for an `Exchange`: the simulated step makes none of its calls."""

    def begin(self, step: int, calls: Iterable[ScriptCall], counted: bool) -> None:
        """Expect no call."""

    def end(self) -> None:
        """None was made."""


def simulate(rank: Rank, step_s: float, full: int, ahead: bool) -> SimulatedDevice:
    """Have a rank whose group has no followers run its steps on such a device, `ahead` of it by one step or not."""
    lockstep: Any = rank._lockstep
    lockstep.exchange = NoScript()
    device = SimulatedDevice(lockstep.programs.assembler, step_s, full)
    lockstep.programs, lockstep.lag = device, int(ahead)
    return device
