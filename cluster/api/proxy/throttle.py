"""Limits how fast the proxy begins requests: one per turn of its event loop, with pauses while the cores are busy.

Beginning a request costs the proxy and the replica together some `BEGIN_S` seconds of CPU time, plus `BYTE_S` for each
byte of the body. The kernel gives a core at once to a process that often sleeps, as these two do. So a hundred requests
per second would take the cores from the ranks of open streams, which compute without a pause. While the cores are busy,
pauses between requests keep the cost of beginning them to the share `SHARE` of the machine. A request that the replica
refuses costs only `REFUSE_S`, which is known when its answer comes.

Nothing heavy is imported here, since this runs in the proxy.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

BEGIN_S, REFUSE_S, BYTE_S = 0.006, 0.002, 30e-9
SHARE = 0.125
LONGEST_REST_S = 0.1
LOOK_S, HELD_S = 0.1, 1.0  # seconds between two looks at the cores; seconds for which a machine found full stays full
IDLE = 0.2  # a machine with a smaller share of idle time is full; not 0, since ranks waiting for each other are idle
STAT = Path("/proc/stat")


class Cores:
    """Tells whether this machine is full, by the kernel's counters of idle time; without counters it never is."""

    def __init__(self, stat: Path = STAT, clock: Callable[[], float] = time.monotonic) -> None:
        self._stat = stat
        self._clock = clock
        self._looked = self._full_until = float("-inf")
        self._counted: tuple[int, int] | None = None  # idle and all ticks at the last look

    def full(self) -> bool:
        """Return whether some look of the last `HELD_S` seconds found less than the share `IDLE` of idle time."""
        if (now := self._clock()) - self._looked >= LOOK_S:
            self._looked, before, self._counted = now, self._counted, self._count()
            if before is not None and self._counted is not None:
                idle, ticks = (new - old for new, old in zip(self._counted, before, strict=True))
                self._full_until = now + HELD_S if idle < IDLE * ticks else self._full_until
        return now < self._full_until

    def _count(self) -> tuple[int, int] | None:
        try:
            with self._stat.open() as file:
                ticks = [int(text) for text in file.readline().split()[1:9]]  # later ones count guests a second time
        except (OSError, ValueError):
            return None
        return sum(ticks[3:5]), sum(ticks)  # ticks 3 and 4: idle, and idle while waiting for a disk


class Throttle:
    """Lets requests begin one by one, in order of arrival. A request calls `wait`, then `charge` if it begins."""

    def __init__(self, cores: Cores | None = None) -> None:
        self._cores = Cores() if cores is None else cores
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._timer: asyncio.Handle | None = None  # the pending call of `_begin` or `_arrange`
        self._next = 0.0  # loop time before which no request begins

    async def wait(self) -> bool:
        """Wait until this request may begin; other tasks of the event loop run at least once meanwhile. Return False if
        the wait was interrupted; the caller then checks for a refusal and waits again.
        """
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if self._timer is None:
            self._arrange()
        return await turn

    def interrupt(self) -> None:
        """End all waits with False: a refusal has come that may answer the waiting requests too."""
        while self._waiting:
            if not (turn := self._waiting.popleft()).done():
                turn.set_result(False)

    def charge(self, body: int) -> None:
        """Note that a request with a body of `body` bytes begins; on a full machine the next one must wait longer."""
        if self._cores.full():
            self._next = asyncio.get_running_loop().time() + rest_s(body, os.cpu_count() or 1)

    def refused(self) -> None:
        """Note that a charged request has been refused, so that the next one may begin sooner."""
        self._next -= (BEGIN_S - REFUSE_S) / (SHARE * (os.cpu_count() or 1))
        if self._timer is not None:
            self._timer.cancel()
            self._arrange()

    def _arrange(self) -> None:
        """Schedule `_begin` for the time at which the next request may begin."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, self._next - loop.time()), self._begin) if self._waiting else None

    def _begin(self) -> None:
        if self._next > asyncio.get_running_loop().time():  # charged after `refused` had arranged this turn
            self._arrange()
            return
        while self._waiting:
            if not (turn := self._waiting.popleft()).done():  # done: cancelled, as its client has left
                turn.set_result(True)
                break
        self._timer = asyncio.get_running_loop().call_soon(self._arrange)  # after `charge` of the request that begins


def rest_s(body: int, cores: int) -> float:
    """Return the seconds between the beginnings of two requests on a full machine with `cores` cores."""
    return min((BEGIN_S + BYTE_S * body) / (SHARE * cores), LONGEST_REST_S)
