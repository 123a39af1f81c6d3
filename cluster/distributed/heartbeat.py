"""Heartbeats between the ranks of a gang on GPUs.

On a CPU a peer that dies closes its connections, and ranks that wait for it in a collective get an error. A GPU in a
collective waits forever without an error. So every rank runs two threads. One writes the rank's heartbeat into the
gang's store and reads those of its peers. The other watches a connection to the rank before it, which ends when that
process dies.
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

from cluster.distributed.cpu_progress import Pulse, cpu_seconds
from cluster.distributed.errors import ALARM, ExitReason, ExitReasons
from cluster.distributed.progress import ProgressClock
from cluster.observability.logs import first_line

logger = logging.getLogger(__name__)

BEATS = 8  # heartbeats within the watchdog's limit
LONGEST_S, SHORTEST_S = 0.5, 0.05  # between two heartbeats
LATE_S = 1.0  # a round later than this: this whole process was stopped, so the silence says nothing about the peers
FOREVER = timedelta(days=365)
NEVER_SENT = 0x41E  # tag of a message that nobody sends: waiting for it only shows the end of the connection


@dataclass(slots=True)
class PeerHeartbeat:
    """The last heartbeat of a rank. `heard` is when it came and `moved` when the rank last made progress, both on our
    clock. `count` numbers the rank's heartbeats, `passed` counts the moments that its device has reached.
    """

    heard: float
    moved: float
    count: int = -1
    step: int = 0
    phase: str = "start"
    passed: int = 0


@dataclass(slots=True)
class StepThread:
    """CPU time of the thread that steps, as the measure of its progress."""

    thread: int = field(default_factory=threading.get_native_id)

    def seconds(self) -> float:
        """Return the thread's CPU seconds so far."""
        return cpu_seconds(self.thread)


class HeartbeatMonitor:
    """Sends the heartbeats of one rank and receives those of its peers. `alarm` is set as soon as a peer leaves with a
    reason or dies, or the store is gone; `effort.thread` is the id of the thread that steps.
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
        self.signs = [PeerHeartbeat(now, now) for _ in range(self._world)]
        self.answered = now
        """When the store last answered, on our clock."""
        self.alarm = threading.Event()
        self.effort = StepThread()
        self.period_s = LONGEST_S
        self._pulse, self._count, self._all = Pulse(self.effort), 0, False
        self._over = threading.Event()

    def start(self) -> None:
        """Start both threads."""
        for call in (self._run, self._feel):
            threading.Thread(target=call, name=f"heartbeat-{self._rank}", daemon=True).start()

    def stop(self) -> None:
        """Send no more heartbeats, and raise no alarm from now on."""
        self._over.set()

    def hurry(self, limit_s: float) -> None:
        """Shorten the heartbeat period so that a silence of `limit_s` is noticed in time."""
        self.period_s = min(LONGEST_S, max(SHORTEST_S, limit_s / BEATS))

    def fresh(self, rank: int) -> bool:
        """Return whether a heartbeat of `rank` came within the last four periods."""
        return time.monotonic() - self.signs[rank].heard < 4 * self.period_s

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                began, period = time.monotonic(), self.period_s
                self._beat()
                self._hear()
                self.answered = time.monotonic()
                self._pause(period)
                self._forgive(time.monotonic() - began - period)
        except RuntimeError as error:
            if not self._over.is_set():
                logger.warning("rank %d: the store of the gang is gone: %s", self._rank, first_line(error))
                self.alarm.set()

    def _beat(self) -> None:
        step, phase = self._position()
        self._pulse.look((step, phase, self._clock.marks), self._clock.waits)
        self._count += 1
        beat = (self._count, step, phase, self._clock.passed, self._pulse.age_s)
        self._store.set(f"beat/{self._rank}", json.dumps(beat))

    def _hear(self) -> None:
        keys = [f"beat/{rank}" for rank in range(self._world)]
        self._all = self._all or bool(self._store.check(keys))  # a rank that still loads has no key yet
        if not self._all:
            return
        now = time.monotonic()
        for sign, said in zip(self.signs, self._store.multi_get(keys), strict=True):
            count, step, phase, passed, age_s = json.loads(said)
            if count != sign.count:
                sign.count, sign.step, sign.phase, sign.passed = count, step, phase, passed
                sign.heard, sign.moved = now, max(sign.moved, now - age_s)

    def _pause(self, seconds: float) -> None:
        """Wait until the next heartbeat is due; set `alarm` as soon as a peer leaves with a reason."""
        if self.alarm.is_set():
            self._over.wait(seconds)
            return
        try:
            self._store.wait([ALARM], timedelta(seconds=seconds))
        except dist.DistStoreError:
            return
        if not self._over.is_set():
            self.alarm.set()

    def _forgive(self, late_s: float) -> None:
        """Do not count the time in which this process was stopped as silence of the peers."""
        if late_s > LATE_S:
            for sign in self.signs:
                sign.heard, sign.moved = sign.heard + late_s, sign.moved + late_s

    def _feel(self) -> None:
        """Wait for the end of the connection to the rank before this one; then publish an exit reason for that rank."""
        before = (self._rank - 1) % self._world
        try:
            work: Any = dist.irecv(torch.zeros(1), group=self._group, group_src=before, tag=NEVER_SENT)
            self._group = None
            work.wait(FOREVER)
        except RuntimeError as error:
            if not self._over.is_set():
                logger.info("rank %d: the connection to rank %d ended: %s", self._rank, before, first_line(error))
                self._exit_reasons.say(ExitReason(before, "its process is gone"), before)
