"""A rank's sign of life for its peers, and theirs for it, while steps run on devices that run behind their hosts.

On a CPU a peer that dies closes its connections, and whoever waits for it in a collective gets an error. A device waits
for good, and says nothing. So a thread of every rank writes a heartbeat into the gang's store and reads the others';
another waits for the end of the connection to the rank before it, which comes when that process dies.
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

BEATS = 8  # heartbeats in the watchdog's limit
LONGEST_S, SHORTEST_S = 0.5, 0.05  # between two of them
LATE_S = 1.0  # a round that is later by so much was held up with its whole process, which is no sign of the peers
FOREVER = timedelta(days=365)
NEVER_SENT = 0x41E  # tag of the message that is waited for only to see the connection end


@dataclass(slots=True)
class PeerHeartbeat:
    """What is known of a rank: its last heartbeat, and on our clock when that came and when the rank last did anything.

    `passed` counts what its device did.
    """

    heard: float
    moved: float
    count: int = -1
    step: int = 0
    phase: str = "start"
    passed: int = 0


@dataclass(slots=True)
class StepThread:
    """CPU seconds of the thread that steps."""

    thread: int = field(default_factory=threading.get_native_id)

    def seconds(self) -> float:
        """See `cpu_progress.Pulse`."""
        return cpu_seconds(self.thread)


class HeartbeatMonitor:
    """The heartbeats of a gang as one rank gives and hears them. `alarm` is set as soon as a peer has left for a
    reason, or is dead; `effort.thread` is the thread that steps.
    """

    def __init__(
        self,
        store: Any,
        exit_reasons: ExitReasons,
        clock: ProgressClock,
        position: Callable[[], tuple[int, str]],
        group: Any,
    ) -> None:
        """`store` is a connection of its own, `group` the process group over gloo of all ranks."""
        self._store, self._exit_reasons, self._clock, self._position = store, exit_reasons, clock, position
        self._group, self._rank, self._world = group, exit_reasons.rank, exit_reasons.world
        now = time.monotonic()
        self.signs = [PeerHeartbeat(now, now) for _ in range(self._world)]
        self.answered = now
        """When the store last answered."""
        self.alarm = threading.Event()
        self.effort = StepThread()
        self.period_s = LONGEST_S
        self._pulse, self._count, self._all = Pulse(self.effort), 0, False
        self._over = threading.Event()

    def start(self) -> None:
        """Begin to give and to hear signs."""
        for call in (self._run, self._feel):
            threading.Thread(target=call, name=f"heartbeat-{self._rank}", daemon=True).start()

    def stop(self) -> None:
        """Give no more signs; what happens to peers from now on is no alarm."""
        self._over.set()

    def hurry(self, limit_s: float) -> None:
        """Beat so often that a silence of `limit_s` is seen in time."""
        self.period_s = min(LONGEST_S, max(SHORTEST_S, limit_s / BEATS))

    def fresh(self, rank: int) -> bool:
        """Whether a rank gave a sign within the last periods."""
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
        self._all = self._all or bool(self._store.check(keys))  # whoever still loads has said nothing yet
        if not self._all:
            return
        now = time.monotonic()
        for sign, said in zip(self.signs, self._store.multi_get(keys), strict=True):
            count, step, phase, passed, age_s = json.loads(said)
            if count != sign.count:
                sign.count, sign.step, sign.phase, sign.passed = count, step, phase, passed
                sign.heard, sign.moved = now, max(sign.moved, now - age_s)

    def _pause(self, seconds: float) -> None:
        """Until the next beat is due; notes an alarm as soon as it is given."""
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
        if late_s > LATE_S:
            for sign in self.signs:
                sign.heard, sign.moved = sign.heard + late_s, sign.moved + late_s

    def _feel(self) -> None:
        """Wait for the end of the connection to the rank before this one, and tell all others of its death."""
        before = (self._rank - 1) % self._world
        try:
            work: Any = dist.irecv(torch.zeros(1), group=self._group, group_src=before, tag=NEVER_SENT)
            self._group = None
            work.wait(FOREVER)
        except RuntimeError as error:
            if not self._over.is_set():
                logger.info("rank %d: the connection to rank %d ended: %s", self._rank, before, first_line(error))
                self._exit_reasons.say(ExitReason(before, "its process is gone"), before)
