"""The device watchdog: waits for this rank's device, and tells a slow step from one that will never end.

A step may take any time while the device or the step thread of any rank makes progress. The wait raises at once if a
peer has left with a reason or is dead. It raises after the watchdog's limit if a rank has sent no heartbeat for that
time, or no rank has made progress.
"""

import threading
import time
from typing import Any

from cluster.device.timing import HOST, Timer
from cluster.distributed.errors import ExitReason, GangError, PeerLostError, StuckDeviceError
from cluster.distributed.heartbeat import HeartbeatMonitor, PeerHeartbeat
from cluster.distributed.mesh import Mesh

LOADING_S = 600.0  # the limit before the first request: ranks compile and capture, and may be minutes apart
LOOK_S = 2.0  # after this time without progress (or half of the limit) a wait checks the peers' heartbeats
HELD_UP_S = 1.0  # a longer gap between two polls means that this process was stopped; such a gap does not count
SHORTEST_S, LONGEST_S = 5e-5, 1e-3  # between two polls of the device
SHARE = 0.02  # the time between two polls, as a share of the wait so far


class DeviceWatchdog:
    """Waits for the device of one rank. `limit_s` is the watchdog's limit: `LOADING_S` until `serve` sets it."""

    def __init__(self, mesh: Mesh, timer: Timer) -> None:
        """`timer` is the timer of this rank's device."""
        self._mesh, self.timer, self._clock = mesh, timer, mesh.world.clock
        self.limit_s, self._serves = LOADING_S, False
        self._clock.device = timer
        self._thread = 0  # id of the thread that steps

    def serve(self, limit_s: float) -> None:
        """Use `limit_s` as the limit from now on: the gang begins to serve requests."""
        self.limit_s, self._serves = limit_s, True
        if self._mesh.heartbeat_monitor is not None:
            self._mesh.heartbeat_monitor.hurry(limit_s)

    def follow(self) -> None:
        """Make the calling thread the one that steps: its work goes to this device, and its CPU time counts as progress
        in the heartbeats. Another thread may have loaded the engine.
        """
        if (thread := threading.get_native_id()) == self._thread:
            return
        self._thread = thread
        self.timer.here()
        if self._mesh.heartbeat_monitor is not None:
            self._mesh.heartbeat_monitor.effort.thread = thread

    def mark(self) -> Any:
        """Return a moment after all work queued so far, for `wait`."""
        return self.timer.now()

    def catch_up(self) -> None:
        """Wait until the device has done all work queued so far. Raises as `wait` does."""
        self.wait(self.mark())

    def wait(self, moment: Any) -> None:
        """Wait until the device has reached a moment.

        Raises:
            PeerLostError: a peer left, is dead or sends no heartbeats, or its device makes no progress.
            StuckDeviceError: this rank's own device makes no progress.
            RuntimeError: an error of the device's driver.
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
        # Seconds of this wait, and those since the device last reached a moment.
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
        """Raise if this device or a peer is lost; this rank's device has made no progress for `still` seconds."""
        if heartbeat_monitor is None:
            if still > self.limit_s:
                raise self._lost(self._mesh.rank, f"has done nothing for {still:.1f} s")
            return
        now, own, signs = time.monotonic(), self._mesh.rank, heartbeat_monitor.signs
        unanswered = now - heartbeat_monitor.answered
        # Rank 0 keeps the store: if the store does not answer the other ranks, rank 0 hangs.
        if own and unanswered > self.limit_s:
            raise self._lost(0, f"and its store have not answered for {unanswered:.1f} s", said=signs[0])
        # The longest silence of a peer; `rank` is negated, so that the lowest of several equally silent ranks is taken.
        silence, rank = max((now - sign.heard, -rank) for rank, sign in enumerate(signs) if rank != own)
        heard = own == 0 or unanswered < self.limit_s / 2  # heartbeats come through the store: no answer, no heartbeats
        if heard and silence > self.limit_s:
            raise self._lost(-rank, f"has given no sign for {silence:.1f} s", said=signs[-rank])
        # Only if no rank at all makes progress is the gang stuck: `quiet` is the time since the last progress of any.
        quiet = min([still, *(now - sign.moved for rank, sign in enumerate(signs) if rank != own)])
        if still > self.limit_s and quiet > self.limit_s:
            behind = self._furthest_behind(signs)
            raise self._lost(behind, f"is furthest behind, and no rank has done anything for {quiet:.1f} s")

    def _furthest_behind(self, signs: list[PeerHeartbeat]) -> int:
        """Return the rank whose device is furthest behind; among equals a peer before this rank, then the lowest."""
        own = self._mesh.rank
        places = [(sign.step, sign.passed) for sign in signs]
        places[own] = (self._mesh.position[0], self._clock.passed)
        return min(range(len(places)), key=lambda rank: (places[rank], rank == own))

    def _lost(self, rank: int, what: str, said: PeerHeartbeat | None = None) -> GangError:
        """Return the error that blames `rank`. If a peer is blamed, publish it as this rank's exit reason first."""
        step, phase = self._mesh.position
        last = "" if said is None or said.count < 0 else f", its last in step {said.step}, phase {said.phase}"
        name = "watchdog_timeout_s" if self._serves else "while loading"
        limit = f"the limit is {self.limit_s:g} s, {name}"
        reason = f"rank {rank} {what}{last} ({limit}; waited for in step {step}, phase {phase})"
        if rank == self._mesh.rank:
            return StuckDeviceError(f"the device of {reason}", rank, step, phase)
        self._mesh.say(ExitReason(rank, reason))
        return PeerLostError(reason, rank, step, phase)
