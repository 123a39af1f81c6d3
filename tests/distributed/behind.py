"""Simulates on CPUs a GPU that communicates over NCCL: a device that runs asynchronously, in a thread of its own.

The host queues a step, continues, and polls whether the device has reached a moment. The collectives that the device
runs have connections of their own. As with NCCL, a collective waits forever if its peer is gone. With `reports_errors`
the collective fails instead, and the next call to the device raises the error.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cluster.batch import StepInput
from cluster.config.tree_shape import TreeShape
from cluster.distributed import mesh as meshes
from cluster.distributed.mesh import Mesh, Rendezvous
from cluster.distributed.watchdog import DeviceWatchdog
from cluster.dp_attention.exchange import Exchange
from cluster.dp_attention.plan import ScriptCall, StepPlan
from cluster.engine import Rank
from cluster.engine.programs import Programs
from cluster.spec.result import StepOutput

MOMENTS_PER_STEP = 64  # how many moments of a step the host notes before the device begins the step


class Moment:
    """A point of the device's work: whether the device has reached it, and when (host's clock, in seconds)."""

    def __init__(self) -> None:
        self.reached, self.reached_at = False, 0.0

    def mark_reached(self) -> None:
        self.reached, self.reached_at = True, time.perf_counter()


class SimulatedDevice(threading.Thread):
    """The simulated device: runs queued work in order. It is also the `Timer` of that work.

    After an error in its work the device hangs. With `reports_errors` the next call to the device also raises an error.
    """

    def __init__(self, reports_errors: bool) -> None:
        super().__init__(daemon=True)
        self._reports_errors, self._queue = reports_errors, queue.SimpleQueue[Callable[[], None]]()
        self._error = ""
        self.pending_moments: list[Moment] = []

    def run(self) -> None:
        while True:
            try:
                self._queue.get()()
            except BaseException:
                if self._reports_errors:
                    self._error = "CUDA error: unspecified launch failure"
                threading.Event().wait()

    def put(self, work: Callable[[], None]) -> None:
        self._raise_reported_error()
        self._queue.put(work)

    def now(self) -> Moment:
        moment = Moment()
        self.put(moment.mark_reached)
        return moment

    def between(self, start: Moment, end: Moment) -> float:
        return end.reached_at - start.reached_at

    def make_current(self) -> None:
        pass

    def reached(self, moment: Moment) -> bool:
        self._raise_reported_error()
        return moment.reached

    def reach_next_moment(self) -> None:
        """Mark the next moment that the host has noted as reached, if one is left."""
        if self.pending_moments:
            self.pending_moments.pop(0).mark_reached()

    def _raise_reported_error(self) -> None:
        if self._error:
            raise RuntimeError(self._error)


class HostExchange:
    """Stands in for `Exchange` on the host: keeps the script of the step that the host queues for the device."""

    def __init__(self) -> None:
        self.script: tuple[int, Sequence[ScriptCall], bool] = (0, (), False)

    def begin(self, step: int, calls: Sequence[ScriptCall], routes_to_experts: bool = False) -> None:
        self.script = step, calls, routes_to_experts

    def end(self) -> None:
        """Do nothing: the device checks the end of the script when it runs the step."""


class PendingOutput:
    """Stands in for the output of a queued step; `step_output` is None until the device has run the step."""

    def __init__(self) -> None:
        self.step_output: StepOutput | None = None

    def read(self) -> StepOutput:
        assert self.step_output is not None, "the output was read before the device has run the step"
        return self.step_output


class QueuedPrograms:
    """Stands in for `Programs`: queues each step for the simulated device."""

    def __init__(
        self, programs: Programs, exchange: Exchange, host_exchange: HostExchange, device: SimulatedDevice, mesh: Mesh
    ) -> None:
        self._programs, self._exchange, self._host_exchange = programs, exchange, host_exchange
        self._device, self._clock = device, mesh.world.clock
        self.assembler, self.step = programs.assembler, programs.step

    def remove_all(self) -> None:
        self._programs.remove_all()

    @property
    def checksum(self) -> int:
        return self._programs.checksum

    @property
    def capture_us(self) -> int:
        return self._programs.capture_us

    @property
    def eager_fallbacks(self) -> int:
        return self._programs.eager_fallbacks

    def run(self, step_input: StepInput, plan: StepPlan, shape: TreeShape) -> PendingOutput:
        output, script = PendingOutput(), self._host_exchange.script
        moments = [Moment() for _ in range(MOMENTS_PER_STEP)]
        self._clock._pending_moments.extend(moments)

        def program() -> None:
            self._device.pending_moments = list(moments)
            self._exchange.begin(*script)
            output.step_output = self._programs.run(step_input, plan, shape).read()
            self._exchange.end()
            for moment in self._device.pending_moments:
                moment.mark_reached()

        self._device.put(program)
        return output


def run_on_simulated_device(
    rank: Rank,
    rendezvous: Rendezvous,
    limit_s: float,
    before_collective: Callable[[int, ScriptCall], None],
    reports_errors: bool = False,
) -> Rank:
    """Make a rank run its steps on a simulated device; return the rank.

    The device calls `before_collective(step, call)` before each collective. `limit_s` is the limit of the watchdog.
    """
    lockstep: Any = rank.lockstep
    mesh, exchange, device = lockstep.mesh, lockstep.exchange, SimulatedDevice(reports_errors)
    assert mesh.attn.size == 1, "followers get step inputs over the exchange, which runs on the device here"
    single_rank_groups = [[rank_number] for rank_number in range(mesh.world.size)]
    mesh.world, mesh.attn = meshes._axes(mesh.rank, mesh.world.size, single_rank_groups, "gloo", mesh.world.clock)

    def enter_collective(call: ScriptCall, collective: Callable[..., Any], *arguments: Any) -> Any:
        before_collective(exchange._step, call)
        device.reach_next_moment()
        result = collective(*arguments)
        device.reach_next_moment()
        return result

    exchange._enter_collective = enter_collective
    lockstep.exchange = HostExchange()
    lockstep.programs = QueuedPrograms(lockstep.programs, exchange, lockstep.exchange, device, mesh)
    mesh.start_heartbeats(meshes._client(rendezvous))
    lockstep.watchdog = DeviceWatchdog(mesh, device)
    lockstep.watchdog.start_serving(limit_s)
    device.start()
    return rank
