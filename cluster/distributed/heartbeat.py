"""Heartbeats between the ranks of a gang (the ranks of one replica) on GPUs.

On a CPU a peer that dies closes its connections, and ranks that wait for it in a collective get an error. A GPU in a
collective waits forever without an error. So every rank runs two threads. One writes the rank's heartbeat into the
gang's store and reads those of its peers. The other watches the connection to the previous rank, because the connection
ends when that rank's process dies.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cluster.distributed.cpu_progress import ProgressTracker, cpu_seconds
from cluster.distributed.errors import ALARM_KEY, ExitReason, ExitReasons
from cluster.distributed.progress import ProgressClock
from cluster.observability.logs import first_line

logger = logging.getLogger(__name__)

HEARTBEATS_PER_LIMIT = 8  # heartbeats within the watchdog's limit
MAX_PERIOD_S, MIN_PERIOD_S = 0.5, 0.05  # between two heartbeats
MAX_DELAY_S = 1.0  # a longer delay means that this whole process was stopped: silence then says nothing about peers
FOREVER = timedelta(days=365)
UNUSED_TAG = 0x41E  # tag of a message that nobody sends: waiting for it only shows the end of the connection


@dataclass(slots=True)
class PeerHeartbeat:
    """The last heartbeat of a rank. `received_at` is when it came and `last_progress_at` when the rank last made
    progress, both by this process's `time.monotonic`. `count` numbers the rank's heartbeats; it is -1 before the first
    one came; until then both times are that of the monitor's start. `device_moments` counts the recorded events, such
    as the start or the end of a collective, that the rank's device has passed.
    """

    received_at: float
    last_progress_at: float
    count: int = -1
    step: int = 0
    phase: str = "start"
    device_moments: int = 0


@dataclass(slots=True)
class StepThread:
    """The CPU time of the thread that runs the steps. It shows whether that thread makes progress."""

    thread: int = field(default_factory=threading.get_native_id)

    def seconds(self) -> float:
        """Return the thread's CPU seconds so far."""
        return cpu_seconds(self.thread)


class HeartbeatMonitor:
    """Sends the heartbeats of one rank and receives those of its peers. `alarm` is set as soon as a peer leaves with a
    reason or dies, or the store is gone. `step_thread.thread` is the id of the thread that runs the steps.
    """

    def __init__(
        self,
        store: Any,
        exit_reasons: ExitReasons,
        clock: ProgressClock,
        position: Callable[[], tuple[int, str]],
        group: Any,
    ) -> None:
        """`store` is a connection used by nothing else, `group` the gloo process group of all ranks."""
        self._store, self._exit_reasons, self._clock, self._position = store, exit_reasons, clock, position
        self._group, self._rank, self._world = group, exit_reasons.rank, exit_reasons.world
        now = time.monotonic()
        self.peer_heartbeats = [PeerHeartbeat(now, now) for _ in range(self._world)]
        self.store_answered_at = now
        """When the store last answered, by `time.monotonic`."""
        self.alarm = threading.Event()
        self.step_thread = StepThread()
        self.period_s = MAX_PERIOD_S
        self._progress, self._count, self._all_started = ProgressTracker(self.step_thread), 0, False
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start both threads."""
        for target in (self._run, self._watch_connection):
            threading.Thread(target=target, name=f"heartbeat-{self._rank}", daemon=True).start()

    def stop(self) -> None:
        """Send no more heartbeats, and raise no alarm from now on."""
        self._stopped.set()

    def set_limit(self, limit_s: float) -> None:
        """Choose the heartbeat period so that several heartbeats fit into `limit_s`, the watchdog's limit."""
        self.period_s = min(MAX_PERIOD_S, max(MIN_PERIOD_S, limit_s / HEARTBEATS_PER_LIMIT))

    def is_fresh(self, rank: int) -> bool:
        """Return whether a heartbeat of `rank` came within the last four periods."""
        return time.monotonic() - self.peer_heartbeats[rank].received_at < 4 * self.period_s

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                started_at, period = time.monotonic(), self.period_s
                self._send_heartbeat()
                self._receive_heartbeats()
                self.store_answered_at = time.monotonic()
                self._wait_for_alarm(period)
                self._exclude_delay(time.monotonic() - started_at - period)
        except RuntimeError as error:
            if not self._stopped.is_set():
                logger.warning("rank %d: the store of the gang is gone: %s", self._rank, first_line(error))
                self.alarm.set()

    def _send_heartbeat(self) -> None:
        step, phase = self._position()
        self._progress.update((step, phase, self._clock.progress_count), self._clock.is_waiting)
        self._count += 1
        heartbeat = (self._count, step, phase, self._clock.device_moments, self._progress.idle_s)
        self._store.set(f"beat/{self._rank}", json.dumps(heartbeat))

    def _receive_heartbeats(self) -> None:
        keys = [f"beat/{rank}" for rank in range(self._world)]
        self._all_started = self._all_started or bool(self._store.check(keys))  # a rank that still loads has no key yet
        if not self._all_started:
            return
        now = time.monotonic()
        for heartbeat, encoded in zip(self.peer_heartbeats, self._store.multi_get(keys), strict=True):
            count, step, phase, passed, age_s = json.loads(encoded)
            if count != heartbeat.count:
                heartbeat.count, heartbeat.step, heartbeat.phase, heartbeat.device_moments = count, step, phase, passed
                heartbeat.received_at, heartbeat.last_progress_at = now, max(heartbeat.last_progress_at, now - age_s)

    def _wait_for_alarm(self, seconds: float) -> None:
        """Wait until the next heartbeat is due; set `alarm` as soon as a peer leaves with a reason."""
        if self.alarm.is_set():
            self._stopped.wait(seconds)
            return
        try:
            self._store.wait([ALARM_KEY], timedelta(seconds=seconds))
        except dist.DistStoreError:
            return
        if not self._stopped.is_set():
            self.alarm.set()

    def _exclude_delay(self, delay_s: float) -> None:
        """If `delay_s` is so long that this process was stopped, do not count that time as silence of the peers."""
        if delay_s > MAX_DELAY_S:
            for heartbeat in self.peer_heartbeats:
                heartbeat.received_at, heartbeat.last_progress_at = (
                    heartbeat.received_at + delay_s,
                    heartbeat.last_progress_at + delay_s,
                )

    def _watch_connection(self) -> None:
        """Wait for the end of the connection to the rank before this one; then publish an exit reason for that rank."""
        previous_rank = (self._rank - 1) % self._world
        try:
            work: Any = dist.irecv(torch.zeros(1), group=self._group, group_src=previous_rank, tag=UNUSED_TAG)
            self._group = None
            work.wait(FOREVER)
        except RuntimeError as error:
            if not self._stopped.is_set():
                logger.info(
                    "rank %d: the connection to rank %d ended: %s", self._rank, previous_rank, first_line(error)
                )
                self._exit_reasons.publish(ExitReason(previous_rank, "its process is gone"), previous_rank)
