"""GPUs that talk over NCCL, simulated on CPUs: a device that runs behind its host, in a thread of its own.

The host queues a step, goes on, and asks whether the device has come to a moment. Collectives of the device have
connections of their own. As with NCCL, one whose peer is gone waits for good, unless that is to be an error, which then
shows with the next call to the device.
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

MOMENTS = 64  # of a step that the host notes before the device has begun it


class Moment:
    """A point of the device's work."""

    def __init__(self) -> None:
        self.reached, self.at = False, 0.0

    def reach(self) -> None:
        self.reached, self.at = True, time.perf_counter()


class Device(threading.Thread):
    """Does what is queued, one after the other; also the `Timer` of what it does. `fails`: an error in its work is told
    by the next call; else it then waits for good.
    """

    def __init__(self, fails: bool) -> None:
        super().__init__(daemon=True)
        self._fails, self._queue = fails, queue.SimpleQueue[Callable[[], None]]()
        self._error = ""
        self.ahead: list[Moment] = []

    def run(self) -> None:
        while True:
            try:
                self._queue.get()()
            except BaseException:
                if self._fails:
                    self._error = "CUDA error: unspecified launch failure"
                threading.Event().wait()

    def put(self, work: Callable[[], None]) -> None:
        self._check()
        self._queue.put(work)

    def now(self) -> Moment:
        moment = Moment()
        self.put(moment.reach)
        return moment

    def between(self, start: Moment, end: Moment) -> float:
        return end.at - start.at

    def make_current(self) -> None:
        pass

    def reached(self, moment: Moment) -> bool:
        self._check()
        return moment.reached

    def advance(self) -> None:
        """The device comes to the next of the moments that its host has noted."""
        if self.ahead:
            self.ahead.pop(0).reach()

    def _check(self) -> None:
        if self._error:
            raise RuntimeError(self._error)


class HostExchange:
    """What the host sees of the exchange: the script, for the step that it queues."""

    def __init__(self) -> None:
        self.script: tuple[int, Sequence[ScriptCall], bool] = (0, (), False)

    def begin(self, step: int, calls: Sequence[ScriptCall], counted: bool = False) -> None:
        self.script = step, calls, counted

    def end(self) -> None:
        """The device will check it."""


class Output:
    """What a step will have decided."""

    def __init__(self) -> None:
        self.decided: StepOutput | None = None

    def read(self) -> StepOutput:
        assert self.decided is not None, "read before the device has run it"
        return self.decided


class BehindPrograms:
    """Programs whose steps are queued for the device."""

    def __init__(self, programs: Programs, exchange: Exchange, host: HostExchange, device: Device, mesh: Mesh) -> None:
        self._programs, self._exchange, self._host = programs, exchange, host
        self._device, self._clock = device, mesh.world.clock
        self.assembler, self.step = programs.assembler, programs.step

    def remove_all(self) -> None:
        self._programs.remove_all()

    @property
    def checksum(self) -> int:
        return self._programs.checksum

    @property
    def eager_fallbacks(self) -> int:
        return self._programs.eager_fallbacks

    def run(self, order: StepInput, plan: StepPlan, shape: TreeShape) -> Output:
        output, script = Output(), self._host.script
        noted = [Moment() for _ in range(MOMENTS)]
        self._clock._pending_moments.extend(noted)

        def program() -> None:
            self._device.ahead = list(noted)
            self._exchange.begin(*script)
            output.decided = self._programs.run(order, plan, shape).read()
            self._exchange.end()
            for moment in self._device.ahead:
                moment.reach()

        self._device.put(program)
        return output


def put_behind(
    rank: Rank, where: Rendezvous, limit_s: float, before: Callable[[int, ScriptCall], None], fails: bool = False
) -> Rank:
    """Give a rank such a device; `before` is called there before each collective, with the number of its step."""
    lockstep: Any = rank.lockstep
    mesh, exchange, device = lockstep.mesh, lockstep.exchange, Device(fails)
    assert mesh.attn.size == 1, "followers get their orders over the exchange, which is on the device here"
    alone = [[number] for number in range(mesh.world.size)]
    mesh.world, mesh.attn = meshes._axes(mesh.rank, mesh.world.size, alone, "gloo", mesh.world.clock)

    def entered(call: ScriptCall, collective: Callable[..., Any], *given: Any) -> Any:
        before(exchange._step, call)
        device.advance()
        result = collective(*given)
        device.advance()
        return result

    exchange._enter_collective = entered
    lockstep.exchange = HostExchange()
    lockstep.programs = BehindPrograms(lockstep.programs, exchange, lockstep.exchange, device, mesh)
    mesh.start_heartbeats(meshes._client(where))
    lockstep.watchdog = DeviceWatchdog(mesh, device)
    lockstep.watchdog.start_serving(limit_s)
    device.start()
    return rank
