"""Limits how fast the proxy begins requests: one per iteration of its event loop, with pauses while the cores are busy.

Beginning a request costs the proxy and the replica together some `BEGIN_S` seconds of CPU time, plus `BYTE_S` for each
byte of the body. Both processes sleep often, and the kernel gives a core at once to a process that often sleeps. So a
hundred requests per second would take the cores from the ranks of open streams, which compute without a pause. While
the cores are busy, this module pauses between requests, so that beginning requests costs at most the share `CPU_SHARE`
of the machine, or more if the pauses would have to exceed `MAX_PAUSE_S` seconds. A request that the replica refuses
costs only `REFUSE_S` seconds; the proxy knows this when the answer comes.

Nothing heavy is imported here, since this runs in the proxy.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

BEGIN_S, REFUSE_S, BYTE_S = 0.006, 0.002, 30e-9
CPU_SHARE = 0.125
MAX_PAUSE_S = 0.1
# Seconds between two checks of the cores, and seconds for which the machine counts as full after a check found it full.
CHECK_S, SATURATED_S = 0.1, 1.0
# A machine with a smaller share of idle time counts as full. The limit is not 0: ranks that wait for each other leave
# cores idle, even on a full machine.
MIN_IDLE_SHARE = 0.2
STAT = Path("/proc/stat")


class CpuLoad:
    """Tells whether the CPUs of this machine are full, by the kernel's counters of idle time. Without these counters a
    machine never counts as full.
    """

    def __init__(self, stat: Path = STAT, clock: Callable[[], float] = time.monotonic) -> None:
        self._stat = stat
        self._clock = clock
        self._checked_at = self._saturated_until = float("-inf")
        self._last_ticks: tuple[int, int] | None = None  # idle and all ticks at the last check

    def saturated(self) -> bool:
        """Return whether a check within the last `SATURATED_S` seconds found a smaller share of idle time than
        `MIN_IDLE_SHARE`.
        """
        if (now := self._clock()) - self._checked_at >= CHECK_S:
            self._checked_at, previous_ticks, self._last_ticks = now, self._last_ticks, self._read_ticks()
            if previous_ticks is not None and self._last_ticks is not None:
                idle, ticks = (new - old for new, old in zip(self._last_ticks, previous_ticks, strict=True))
                self._saturated_until = now + SATURATED_S if idle < MIN_IDLE_SHARE * ticks else self._saturated_until
        return now < self._saturated_until

    def _read_ticks(self) -> tuple[int, int] | None:
        try:
            with self._stat.open() as file:
                ticks = [int(field) for field in file.readline().split()[1:9]]  # later ones count guests a second time
        except (OSError, ValueError):
            return None
        return sum(ticks[3:5]), sum(ticks)  # ticks 3 and 4: idle, and idle while waiting for a disk


class Throttle:
    """Lets requests begin one by one, in order of arrival. A request calls `wait`, then `on_begin` if it begins."""

    def __init__(self, cpu_load: CpuLoad | None = None) -> None:
        self._cpu_load = CpuLoad() if cpu_load is None else cpu_load
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._timer: asyncio.Handle | None = None  # the pending call of `_begin_next` or `_schedule_next`
        self._next_begin_at = 0.0  # loop time before which no request begins

    async def wait(self) -> bool:
        """Wait until this request may begin, and return True. Meanwhile other tasks of the event loop run at least
        once. Return False if `interrupt` ended the wait; the caller then checks for a refusal and waits again.
        """
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        if self._timer is None:
            self._schedule_next()
        return await waiter

    def interrupt(self) -> None:
        """Make all waits return False, because a refusal has come that may answer the waiting requests too."""
        while self._waiting:
            if not (waiter := self._waiting.popleft()).done():
                waiter.set_result(False)

    def on_begin(self, body_bytes: int) -> None:
        """Record that a request with a body of `body_bytes` bytes begins. On a full machine the next waits longer."""
        if self._cpu_load.saturated():
            self._next_begin_at = asyncio.get_running_loop().time() + pause_s(body_bytes, os.cpu_count() or 1)

    def on_refused(self) -> None:
        """Record that a request that had begun has been refused, so that the next one may begin sooner."""
        self._next_begin_at -= (BEGIN_S - REFUSE_S) / (CPU_SHARE * (os.cpu_count() or 1))
        if self._timer is not None:
            self._timer.cancel()
            self._schedule_next()

    def _schedule_next(self) -> None:
        """Schedule `_begin_next` for the time at which the next request may begin."""
        loop = asyncio.get_running_loop()
        self._timer = (
            loop.call_later(max(0.0, self._next_begin_at - loop.time()), self._begin_next) if self._waiting else None
        )

    def _begin_next(self) -> None:
        if self._next_begin_at > asyncio.get_running_loop().time():  # `on_begin` came after this call was scheduled
            self._schedule_next()
            return
        while self._waiting:
            if not (waiter := self._waiting.popleft()).done():  # done: cancelled, as its client has left
                waiter.set_result(True)
                break
        # `_schedule_next` must run after `on_begin` of the request that begins now, so it is not called directly.
        self._timer = asyncio.get_running_loop().call_soon(self._schedule_next)


def pause_s(body_bytes: int, cores: int) -> float:
    """Return how many seconds the proxy waits, while all CPUs are busy, between starting a request with a body of
    `body_bytes` bytes and starting the next one. `cores` is the machine's number of cores. The wait is at most
    `MAX_PAUSE_S`.
    """
    return min((BEGIN_S + BYTE_S * body_bytes) / (CPU_SHARE * cores), MAX_PAUSE_S)
