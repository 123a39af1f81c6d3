"""Turns in which the proxy begins requests: one per turn of its event loop, and with rests while the cores are busy.

To begin a request costs the proxy and the replica together some `BEGIN_S` of CPU time, and `BYTE_S` more for each byte
of its body. The kernel gives a core at once to a process that often sleeps, as these two do; so a hundred requests a
second would take the cores from the ranks of open streams, which compute without a pause. While the cores are busy,
rests between two beginnings keep what they cost to `SHARE` of the machine. A request that the replica refuses costs
`REFUSE_S` only, which is known when its answer comes.

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
LOOK_S, HELD_S = 0.1, 1.0  # seconds between two looks at the cores; for how long a machine found full counts as full
IDLE = 0.2  # below this share of idle time a machine is full; ranks that wait for each other always leave some
STAT = Path("/proc/stat")


class Cores:
    """Whether this machine is full, by the kernel's counters of idle time; never, where there are none."""

    def __init__(self, stat: Path = STAT, clock: Callable[[], float] = time.monotonic) -> None:
        self._stat = stat
        self._clock = clock
        self._looked = self._full_until = float("-inf")
        self._counted: tuple[int, int] | None = None  # idle and all ticks at the last look

    def full(self) -> bool:
        """Whether the cores were idle for less than `IDLE` of the time between two looks of the last second."""
        if (now := self._clock()) - self._looked >= LOOK_S:
            self._looked, before, self._counted = now, self._counted, self._count()
            if before is not None and self._counted is not None:
                idle, ticks = (new - old for new, old in zip(self._counted, before, strict=True))
                self._full_until = now + HELD_S if idle < IDLE * ticks else self._full_until
        return now < self._full_until

    def _count(self) -> tuple[int, int] | None:
        try:
            with self._stat.open() as file:
                ticks = [int(text) for text in file.readline().split()[1:9]]  # those after belong to guests, again
        except (OSError, ValueError):
            return None
        return sum(ticks[3:5]), sum(ticks)  # idle, and idle while a disk is waited for


class Throttle:
    """Who begins next, in the order of arrival. Wait for a turn, then `charge` it if the request really begins."""

    def __init__(self, cores: Cores | None = None) -> None:
        self._cores = Cores() if cores is None else cores
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._timer: asyncio.Handle | None = None  # by which the event loop will call `_begin` or `_arrange`
        self._next = 0.0

    async def wait(self) -> bool:
        """Wait until the next request may begin; everybody else on the event loop is served at least once. False: the
        wait was interrupted, and the request must ask again.
        """
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if self._timer is None:
            self._arrange()
        return await turn

    def interrupt(self) -> None:
        """End all waits: what the requests would learn by beginning is known now."""
        while self._waiting:
            if not (turn := self._waiting.popleft()).done():
                turn.set_result(False)

    def charge(self, body: int) -> None:
        """Note that a request with a body of so many bytes begins: on a full machine the next one has to rest."""
        if self._cores.full():
            self._next = asyncio.get_running_loop().time() + rest_s(body, os.cpu_count() or 1)

    def refused(self) -> None:
        """Note that a request that was charged for has been refused: the next one may begin sooner."""
        self._next -= (BEGIN_S - REFUSE_S) / (SHARE * (os.cpu_count() or 1))
        if self._timer is not None:
            self._timer.cancel()
            self._arrange()

    def _arrange(self) -> None:
        """Have the next turn given when its rest is over."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, self._next - loop.time()), self._begin) if self._waiting else None

    def _begin(self) -> None:
        while self._waiting:
            if not (turn := self._waiting.popleft()).done():  # done: its client has left
                turn.set_result(True)
                break
        self._timer = asyncio.get_running_loop().call_soon(self._arrange)  # after the request was charged for


def rest_s(body: int, cores: int) -> float:
    """Seconds from one beginning to the next on a full machine of so many cores."""
    return min((BEGIN_S + BYTE_S * body) / (SHARE * cores), LONGEST_REST_S)
