"""The wait of a rank for its device, which tells a step that takes long from one that will never end.

Progress is what the devices and the threads of the ranks do: a step may take as long as it needs while any rank does
something. The wait ends without a result at once when a peer has left for a reason or is dead, and after the watchdog's
limit when a rank has given no sign for so long, or none has done anything.
"""

import threading
import time
from typing import Any

from cluster.device.timing import HOST, Timer
from cluster.distributed.errors import ExitReason, GangError, PeerLostError, StuckDeviceError
from cluster.distributed.heartbeat import HeartbeatMonitor, PeerHeartbeat
from cluster.distributed.mesh import Mesh

LOADING_S = 600.0  # the limit before the first request, when ranks compile and capture and may be minutes apart
LOOK_S = 2.0  # from then on a wait looks at the peers' signs, or from half of the limit on
HELD_UP_S = 1.0  # this process did not run for so long: time in which it saw nothing is no sign of anything
SHORTEST_S, LONGEST_S = 5e-5, 1e-3  # between two looks at the device
SHARE = 0.02  # of the wait so far, between two looks


class DeviceWatchdog:
    """Over one rank's device. `limit_s` is the watchdog's limit; that of loading, until it is set."""

    def __init__(self, mesh: Mesh, timer: Timer) -> None:
        """`timer` is that of the device that runs what this rank queues."""
        self._mesh, self.timer, self._clock = mesh, timer, mesh.world.clock
        self.limit_s, self._serves = LOADING_S, False
        self._clock.device = timer
        self._thread = 0  # the one that steps

    def serve(self, limit_s: float) -> None:
        """Requests come from now on."""
        self.limit_s, self._serves = limit_s, True
        if self._mesh.heartbeat_monitor is not None:
            self._mesh.heartbeat_monitor.hurry(limit_s)

    def follow(self) -> None:
        """The calling thread steps, whichever has loaded: from now on it works for the device, and its CPU time is what
        the peers hear of.
        """
        if (thread := threading.get_native_id()) == self._thread:
            return
        self._thread = thread
        self.timer.here()
        if self._mesh.heartbeat_monitor is not None:
            self._mesh.heartbeat_monitor.effort.thread = thread

    def mark(self) -> Any:
        """A moment behind all that was queued so far, to `wait` for."""
        return self.timer.now()

    def catch_up(self) -> None:
        """Wait until the device has done all that was queued so far; raises as `wait`."""
        self.wait(self.mark())

    def wait(self, moment: Any) -> None:
        """Wait until the device has come to a moment.

        Raises:
            PeerLostError: a peer left, is dead, gives no sign, or its device does nothing.
            StuckDeviceError: it is this rank's own device that does nothing.
            RuntimeError: what the device's driver says, once it cannot go on.
        """
        if self.timer is HOST or self.timer.reached(moment):
            self._clock.look()
            return
        self._clock.awaiting = True
        try:
            self._poll(moment)
        finally:
            self._clock.awaiting = False

    def _poll(self, moment: Any) -> None:
        heartbeat_monitor = self._mesh.heartbeat_monitor
        waited = still = 0.0
        passed, last = self._clock.look(), time.monotonic()
        while not self.timer.reached(moment):
            if heartbeat_monitor is not None and heartbeat_monitor.alarm.is_set():
                raise self._mesh.explain("a peer left while this rank's device waited for it")
            time.sleep(min(LONGEST_S, max(SHORTEST_S, SHARE * waited)))
            now = time.monotonic()
            waited, still = waited + now - last, still + (now - last if now - last < HELD_UP_S else 0.0)
            last = now
            if self._clock.look() != passed:
                passed, still = self._clock.passed, 0.0
            if still > min(LOOK_S, self.limit_s / 2):
                self._look(heartbeat_monitor, still)

    def _look(self, heartbeat_monitor: HeartbeatMonitor | None, still: float) -> None:
        """The device has done nothing for `still` seconds: is it, or a peer, lost?"""
        if heartbeat_monitor is None:
            if still > self.limit_s:
                raise self._lost(self._mesh.rank, f"has done nothing for {still:.1f} s")
            return
        now, own, signs = time.monotonic(), self._mesh.rank, heartbeat_monitor.signs
        unanswered = now - heartbeat_monitor.answered
        if own and unanswered > self.limit_s:
            raise self._lost(0, f"and its store have not answered for {unanswered:.1f} s", said=signs[0])
        silence, rank = max((now - sign.heard, -rank) for rank, sign in enumerate(signs) if rank != own)
        heard = own == 0 or unanswered < self.limit_s / 2  # without answers of the store nobody is
        if heard and silence > self.limit_s:
            raise self._lost(-rank, f"has given no sign for {silence:.1f} s", said=signs[-rank])
        quiet = min([still, *(now - sign.moved for rank, sign in enumerate(signs) if rank != own)])
        if still > self.limit_s and quiet > self.limit_s:
            behind = self._furthest_behind(signs)
            raise self._lost(behind, f"is furthest behind, and no rank has done anything for {quiet:.1f} s")

    def _furthest_behind(self, signs: list[PeerHeartbeat]) -> int:
        """The rank whose device the others wait for; where several are equally far, one of them."""
        own = self._mesh.rank
        places = [(sign.step, sign.passed) for sign in signs]
        places[own] = (self._mesh.position[0], self._clock.passed)
        return min(range(len(places)), key=lambda rank: (places[rank], rank == own))

    def _lost(self, rank: int, what: str, said: PeerHeartbeat | None = None) -> GangError:
        """The error that blames a rank, after the peers were told."""
        step, phase = self._mesh.position
        last = "" if said is None or said.count < 0 else f", its last in step {said.step}, phase {said.phase}"
        name = "watchdog_timeout_s" if self._serves else "while loading"
        limit = f"the limit is {self.limit_s:g} s, {name}"
        reason = f"rank {rank} {what}{last} ({limit}; waited for in step {step}, phase {phase})"
        if rank == self._mesh.rank:
            return StuckDeviceError(f"the device of {reason}", rank, step, phase)
        self._mesh.say(ExitReason(rank, reason))
        return PeerLostError(reason, rank, step, phase)
