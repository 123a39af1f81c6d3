"""The device watchdog: waits for this rank's device, and distinguishes a slow step from one that will never end.

A step may take any time while the device or the step thread of any rank makes progress. The wait raises at once if a
peer has left with a reason or is dead. It raises after the watchdog's limit if a rank has sent no heartbeat for that
time, or no rank has made progress.
"""

import threading
import time
from typing import Any

from cluster.device.timing import HOST_TIMER, Timer
from cluster.distributed.errors import ExitReason, GangError, PeerLostError, StuckDeviceError
from cluster.distributed.heartbeat import HeartbeatMonitor, PeerHeartbeat
from cluster.distributed.mesh import Mesh

LOADING_S = 600.0  # the limit before the first request: ranks compile and capture, and may be minutes apart
CHECK_AFTER_S = 2.0  # after this time without progress (or half of the limit, if less) a wait checks the heartbeats
MAX_POLL_GAP_S = 1.0  # a longer gap between two polls means that this process was stopped; such a gap does not count
MIN_POLL_S, MAX_POLL_S = 5e-5, 1e-3  # between two polls of the device
POLL_SHARE = 0.02  # the time between two polls, as a share of the wait so far


class DeviceWatchdog:
    """Waits for the device of one rank. `limit_s` is how long a peer may send no heartbeat, or the whole gang (the
    ranks of the replica) may make no progress, before a wait raises an error. It is `LOADING_S` until `start_serving`
    sets it.
    """

    def __init__(self, mesh: Mesh, timer: Timer) -> None:
        """`timer` is the timer of this rank's device."""
        self._mesh, self.timer, self._clock = mesh, timer, mesh.world.clock
        self.limit_s, self._serving = LOADING_S, False
        self._clock.device_timer = timer
        self._thread = 0  # id of the thread that runs the steps

    def start_serving(self, limit_s: float) -> None:
        """Use `limit_s` as the limit from now on: the gang begins to serve requests."""
        self.limit_s, self._serving = limit_s, True
        if self._mesh.heartbeat_monitor is not None:
            self._mesh.heartbeat_monitor.set_limit(limit_s)

    def use_current_thread(self) -> None:
        """Make the calling thread the one that runs the steps: its work goes to this device, and its CPU time counts as
        progress in the heartbeats. Each step calls this, as another thread may have loaded the engine.
        """
        if (thread := threading.get_native_id()) == self._thread:
            return
        self._thread = thread
        self.timer.make_current()
        if self._mesh.heartbeat_monitor is not None:
            self._mesh.heartbeat_monitor.step_thread.thread = thread

    def mark(self) -> Any:
        """Return a moment for `wait`: the device reaches it when it has done all work queued so far."""
        return self.timer.now()

    def wait_for_device(self) -> None:
        """Wait until the device has done all work queued so far. Raises as `wait` does."""
        self.wait(self.mark())

    def wait(self, moment: Any) -> None:
        """Wait until the device has reached `moment`. On a CPU, return at once.

        Raises:
            PeerLostError: a peer left, is dead or sends no heartbeats, or its device makes no progress.
            StuckDeviceError: this rank's own device makes no progress.
            RuntimeError: an error of the device's driver.
        """
        if self.timer is HOST_TIMER or self.timer.reached(moment):
            self._clock.poll_device()
            return
        self._clock.waits_for_device = True
        try:
            self._poll(moment)
        finally:
            self._clock.waits_for_device = False

    def _poll(self, moment: Any) -> None:
        heartbeat_monitor = self._mesh.heartbeat_monitor
        # Seconds of this wait, and those since the device last reached a moment.
        waited_s = idle_s = 0.0
        device_moments, last_poll_at = self._clock.poll_device(), time.monotonic()
        while not self.timer.reached(moment):
            if heartbeat_monitor is not None and heartbeat_monitor.alarm.is_set():
                raise self._mesh.explain("a peer left while this rank's device waited for it")
            time.sleep(min(MAX_POLL_S, max(MIN_POLL_S, POLL_SHARE * waited_s)))
            now = time.monotonic()
            waited_s, idle_s = (
                waited_s + now - last_poll_at,
                idle_s + (now - last_poll_at if now - last_poll_at < MAX_POLL_GAP_S else 0.0),
            )
            last_poll_at = now
            if self._clock.poll_device() != device_moments:
                device_moments, idle_s = self._clock.device_moments, 0.0
            if idle_s > min(CHECK_AFTER_S, self.limit_s / 2):
                self._check_ranks(heartbeat_monitor, idle_s)

    def _check_ranks(self, heartbeat_monitor: HeartbeatMonitor | None, idle_s: float) -> None:
        """Raise if this device or a peer is lost; this rank's device has made no progress for `idle_s` seconds."""
        if heartbeat_monitor is None:
            if idle_s > self.limit_s:
                raise self._blame(self._mesh.rank, f"has done nothing for {idle_s:.1f} s")
            return
        now, own_rank, heartbeats = time.monotonic(), self._mesh.rank, heartbeat_monitor.peer_heartbeats
        unanswered_s = now - heartbeat_monitor.store_answered_at
        # Rank 0 keeps the store: if the store does not answer the other ranks, rank 0 hangs.
        if own_rank and unanswered_s > self.limit_s:
            raise self._blame(
                0, f"and its store have not answered for {unanswered_s:.1f} s", last_heartbeat=heartbeats[0]
            )
        # The longest silence of a peer; `rank` is negated, so that the lowest of several equally silent ranks is taken.
        silent_s, rank = max(
            (now - heartbeat.received_at, -rank) for rank, heartbeat in enumerate(heartbeats) if rank != own_rank
        )
        # Heartbeats come through the store: if it does not answer, no heartbeat can come.
        store_answers = own_rank == 0 or unanswered_s < self.limit_s / 2
        if store_answers and silent_s > self.limit_s:
            raise self._blame(-rank, f"has given no sign for {silent_s:.1f} s", last_heartbeat=heartbeats[-rank])
        # The gang is stuck only if no rank makes progress: `gang_idle_s` is the time since the last progress of any.
        gang_idle_s = min(
            [
                idle_s,
                *(now - heartbeat.last_progress_at for rank, heartbeat in enumerate(heartbeats) if rank != own_rank),
            ]
        )
        if idle_s > self.limit_s and gang_idle_s > self.limit_s:
            last_rank = self._furthest_behind(heartbeats)
            raise self._blame(last_rank, f"is furthest behind, and no rank has done anything for {gang_idle_s:.1f} s")

    def _furthest_behind(self, heartbeats: list[PeerHeartbeat]) -> int:
        """Return the rank whose device is furthest behind. Of several such ranks, prefer a peer to this rank, and then
        the lowest number.
        """
        own_rank = self._mesh.rank
        progress = [(heartbeat.step, heartbeat.device_moments) for heartbeat in heartbeats]
        progress[own_rank] = (self._mesh.position[0], self._clock.device_moments)
        return min(range(len(progress)), key=lambda rank: (progress[rank], rank == own_rank))

    def _blame(self, rank: int, problem: str, last_heartbeat: PeerHeartbeat | None = None) -> GangError:
        """Return the error that blames `rank`. If a peer is blamed, publish it as this rank's exit reason first."""
        step, phase = self._mesh.position
        last_position = (
            ""
            if last_heartbeat is None or last_heartbeat.count < 0
            else f", its last in step {last_heartbeat.step}, phase {last_heartbeat.phase}"
        )
        limit_name = "watchdog_timeout_s" if self._serving else "while loading"
        limit = f"the limit is {self.limit_s:g} s, {limit_name}"
        reason = f"rank {rank} {problem}{last_position} ({limit}; waited for in step {step}, phase {phase})"
        if rank == self._mesh.rank:
            return StuckDeviceError(f"the device of {reason}", rank, step, phase)
        self._mesh.publish_exit_reason(ExitReason(rank, reason))
        return PeerLostError(reason, rank, step, phase)
