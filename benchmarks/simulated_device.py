"""A simulated device that takes a fixed time for each step, to measure only the host's work of a rank.

Like a GPU, the device runs queued steps asynchronously; reading a step's results waits until the step's time is over. A
step's inputs are really assembled and sent. Tokens are meaningless; every tree is accepted except for its last level.
"""

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from cluster.batch import StepInput
from cluster.bench import rank_process
from cluster.config import EngineConfig
from cluster.config.tree_shape import TreeShape
from cluster.device.timing import HOST
from cluster.dp_attention.plan import ScriptCall, StepPlan
from cluster.engine import Rank
from cluster.engine.assembler import Assembler
from cluster.spec.result import PhaseTimes, StepOutput

TOKEN = 7


class SimulatedDevice:
    """Replaces `Programs`. Only steps that decode `full` requests, without prompt chunks, are recorded, in seconds:
    `gaps`, the device's idle time before the step; `waited`, the host's wait for the step; `sent`, the time in which
    the host assembles the step's inputs.
    """

    checksum = 0
    """The checksum of captured programs; there are none."""
    launched_anew = 0

    def __init__(self, assembler: Assembler, step_s: float, full: int) -> None:
        self.assembler = assembler
        self.gaps: list[float] = []
        self.waited: list[float] = []
        self.sent: list[float] = []
        self._step_s, self._full, self._free = step_s, full, 0.0

    def drop(self) -> None:
        """Do nothing: there are no captured programs to drop."""

    def run(self, order: StepInput, plan: StepPlan, shape: TreeShape) -> "SimulatedOutput":
        """Assemble and queue a step; return its output, which can be read once the step's time is over."""
        began = time.perf_counter()
        self.assembler.send(order, shape.forced)
        now, finals = time.perf_counter(), sum(chunk.final for chunk in order.chunks)
        counts = len(order.decodes), finals, sum(chunk.stop - chunk.start for chunk in order.chunks)
        steady = counts == (self._full, 0, 0)
        if steady:
            self.gaps.append(max(0.0, now - self._free))
            self.sent.append(now - began)
        self._free = max(now, self._free) + self._step_s  # steps run one after the other
        return SimulatedOutput(self, self._free, counts, shape.num_steps, steady)


class SimulatedOutput:
    """Replaces a `StepOutput`."""

    def __init__(
        self, device: SimulatedDevice, over: float, counts: tuple[int, int, int], num_steps: int, steady: bool
    ) -> None:
        self._device, self._over, self._counts, self._num_steps, self._steady = device, over, counts, num_steps, steady

    def read(self) -> StepOutput:
        """Wait until the step's time is over, and return its simulated results."""
        left = self._over - time.perf_counter()
        if left > 0:
            time.sleep(left)
        if self._steady:
            self._device.waited.append(max(0.0, left))
        requests, finals, rows = self._counts
        width = self._num_steps + 1
        given = [*([TOKEN] * width), max(1, self._num_steps), width] * requests + [TOKEN] * finals + [1] * rows
        phases = PhaseTimes(HOST, [0.0] * 4)
        return StepOutput(torch.empty(0), requests, width, finals, rows, phases, numbers=given)


class NoScript:
    """Replaces an `Exchange`, because a simulated step makes no collective calls."""

    def begin(self, step: int, calls: Iterable[ScriptCall], counted: bool) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing: no call was made, so there is nothing to check."""


def simulate(rank: Rank, step_s: float, full: int, ahead: bool) -> SimulatedDevice:
    """Put a simulated device into a rank without followers, and return the device. `ahead`: the host runs one step
    ahead of the device.
    """
    lockstep: Any = rank.lockstep
    lockstep.exchange = NoScript()
    device = SimulatedDevice(lockstep.programs.assembler, step_s, full)
    lockstep.programs, lockstep.lag = device, int(ahead)
    return device


def prepare(rank: Rank, config: EngineConfig, options: Mapping[str, Any]) -> dict[str, list[float]]:
    """Put a simulated device with steps of `device_ms` into a rank; return the lists that it fills."""
    device = simulate(rank, options["device_ms"] / 1e3, config.max_running_requests, config.overlap)
    return {"gaps": device.gaps, "waited": device.waited, "sent": device.sent}


if __name__ == "__main__":
    rank_process.main(int(sys.argv[1]), prepare)
