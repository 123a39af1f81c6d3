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
from cluster.device.timing import HOST_TIMER
from cluster.dp_attention.plan import ScriptCall, StepPlan
from cluster.engine import Rank
from cluster.engine.assembler import Assembler
from cluster.spec.result import PhaseTimes, StepOutput

TOKEN = 7


class SimulatedDevice:
    """Replaces a rank's captured programs. Only steps that decode `full_batch` requests, without prompt chunks, are
    recorded: `idle_seconds`, how long the device was idle before the step; `wait_seconds`, how long the host waited for
    the step; `assemble_seconds`, how long the host assembled the step's inputs.
    """

    checksum = 0
    """The checksum of captured programs; there are none."""
    capture_us = eager_fallbacks = 0

    def __init__(self, assembler: Assembler, step_s: float, full_batch: int) -> None:
        self.assembler = assembler
        self.idle_seconds: list[float] = []
        self.wait_seconds: list[float] = []
        self.assemble_seconds: list[float] = []
        self._step_s, self._full_batch, self._free_at = step_s, full_batch, 0.0

    def remove_all(self) -> None:
        """Do nothing: there are no captured programs to drop."""

    def run(self, step_input: StepInput, plan: StepPlan, shape: TreeShape) -> "SimulatedOutput":
        """Assemble and queue a step; return its output, which can be read once the step's time is over."""
        started_at = time.perf_counter()
        self.assembler.send(step_input, shape.forced_nodes)
        now, final_chunks = time.perf_counter(), sum(chunk.final for chunk in step_input.chunks)
        counts = len(step_input.decodes), final_chunks, sum(chunk.stop - chunk.start for chunk in step_input.chunks)
        steady = counts == (self._full_batch, 0, 0)
        if steady:
            self.idle_seconds.append(max(0.0, now - self._free_at))
            self.assemble_seconds.append(now - started_at)
        self._free_at = max(now, self._free_at) + self._step_s  # steps run one after the other
        return SimulatedOutput(self, self._free_at, counts, shape.num_steps, steady)


class SimulatedOutput:
    """Replaces a `StepOutput`."""

    def __init__(
        self, device: SimulatedDevice, done_at: float, counts: tuple[int, int, int], num_steps: int, steady: bool
    ) -> None:
        self._device, self._done_at, self._counts, self._num_steps, self._steady = (
            device,
            done_at,
            counts,
            num_steps,
            steady,
        )

    def read(self) -> StepOutput:
        """Wait until the step's time is over, and return its simulated results."""
        remaining_s = self._done_at - time.perf_counter()
        if remaining_s > 0:
            time.sleep(remaining_s)
        if self._steady:
            self._device.wait_seconds.append(max(0.0, remaining_s))
        requests, final_chunks, rows = self._counts
        width = self._num_steps + 1
        numbers = [*([TOKEN] * width), max(1, self._num_steps), width] * requests + [TOKEN] * final_chunks + [1] * rows
        phases = PhaseTimes(HOST_TIMER, [0.0] * 4)
        return StepOutput(torch.empty(0), requests, width, final_chunks, rows, phases, values=numbers)


class NoCollectives:
    """Replaces an `Exchange`, because a simulated step makes no collective calls."""

    def begin(self, step: int, calls: Iterable[ScriptCall], counted: bool) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing: no call was made, so there is nothing to check."""


def simulate(rank: Rank, step_s: float, full_batch: int, overlap: bool) -> SimulatedDevice:
    """Put a simulated device into a rank, and return the device. The rank's attention group must have no other rank. If
    `overlap`, the host runs one step ahead of the device.
    """
    lockstep: Any = rank.lockstep
    lockstep.exchange = NoCollectives()
    device = SimulatedDevice(lockstep.programs.assembler, step_s, full_batch)
    lockstep.programs, lockstep.max_in_flight = device, int(overlap)
    return device


def prepare(rank: Rank, config: EngineConfig, options: Mapping[str, Any]) -> dict[str, list[float]]:
    """Put a simulated device with steps of `device_ms` into a rank; return the lists that it fills."""
    device = simulate(rank, options["device_ms"] / 1e3, config.max_running_requests, config.overlap)
    return {
        "idle_seconds": device.idle_seconds,
        "wait_seconds": device.wait_seconds,
        "assemble_seconds": device.assemble_seconds,
    }


if __name__ == "__main__":
    rank_process.main(int(sys.argv[1]), prepare)
