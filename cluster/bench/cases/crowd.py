"""`aerie bench crowd`: kill a rank while streams are open and requests queue; measure how soon all requests continue.

At float64, every request must end with the tokens of an undisturbed run (law 1 of docs/architecture.md). Every open
request must be resubmitted as soon as the new gang serves.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass
from http.client import HTTPException
from typing import Any

from cluster.bench.cases.faults import prompts_of
from cluster.bench.fault import GANG, OPEN_TOKENS, Fault, undisturbed
from cluster.bench.report import Say, columns
from cluster.bench.server import ServerProcess
from cluster.bench.streams import ClientStream, errors_of, page, run_together

RESUMED, OPEN = "aerie_resumed_streams_total", "aerie_open_requests"
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Size:
    """Requests that decode (on all ranks together), requests that queue, tokens of each request, and kills."""

    streams: int = 16
    queued: int = 100
    max_tokens: int = 64
    kills: int = 2


QUICK = Size(streams=4, queued=12, max_tokens=24, kills=1)


@dataclass(slots=True)
class KillRound:
    """One kill. `open` requests were unfinished at the kill; `resumed` requests were submitted to the new gang. /health
    answered 200 again `healthy_s` after the kill, and the last request was resumed `resumed_s` after that. `cut`
    requests failed; `different` requests got other tokens than without a kill.
    """

    killed: str
    open: int
    resumed: int
    healthy_s: float | None
    resumed_s: float | None
    cut: int
    different: int

    @property
    def failed(self) -> bool:
        """Whether a request failed, was not resumed or got other tokens, or the server never was healthy again."""
        return bool(self.cut or self.different or self.resumed < self.open or self.healthy_s is None)


def measure(size: Size, say: Say) -> dict[str, Any]:
    """Kill a rank `size.kills` times while streams run; return a `KillRound` for each kill."""
    rounds: list[KillRound] = []

    def due(streams: list[ClientStream]) -> bool:
        """Return whether enough streams decode and the replica has received all unfinished requests."""
        decoding = sum(len(s.token_ids) >= OPEN_TOKENS for s in streams) >= size.streams
        return decoding and counted(server.port, OPEN) >= sum(s.ended is None for s in streams)

    with ServerProcess([*GANG, f"max_running_requests={size.streams // 2}", "max_queue_wait_s=600"]) as server:
        say(f"crowd: ready after {server.ready_s:.1f} s")
        work = undisturbed(server, prompts_of(size.streams + size.queued), size.max_tokens)
        for number in range(size.kills):
            killed = f"rank {number % 2}"
            counter = Counter(server.port, Fault(server, f"kill {killed}", due))
            streams = run_together(server.port, work.model, work.prompts, work.max_tokens, counter.look)
            resumed_s, resumed = counter.settle()
            fault, cut, different = counter.fault, len(errors_of(streams)), work.different(streams)
            rounds.append(KillRound(killed, fault.open, resumed, fault.healthy_s, resumed_s, cut, different))
            say(f"crowd: {rounds[-1]}")
    return {
        "rounds": [asdict(r) for r in rounds],
        "failed": sum(r.failed for r in rounds),
        "slowest_resumed_s": max((r.resumed_s or 0.0 for r in rounds), default=0.0),
    }


class Counter:
    """Polls, from the fault on, how many streams have been resumed."""

    def __init__(self, port: int, fault: Fault) -> None:
        self.fault = fault
        self._port, self._before = port, counted(port, RESUMED)
        self._next_s = 0.0
        self._times: list[tuple[float, float]] = []

    def look(self, streams: list[ClientStream]) -> None:
        """Cause the fault once it is due, and then poll the count. Call it repeatedly while the streams run."""
        self.fault.look(streams)
        if self.fault.seconds is not None and self.fault.seconds >= self._next_s:
            self._read(self.fault.seconds)

    def settle(self) -> tuple[float | None, int]:
        """Wait until the server is healthy again. Return the seconds from then until the last stream was resumed, and
        the number of resumed streams. The seconds are None if the server was never healthy again.
        """
        self.fault.settle()
        if self.fault.seconds is None:
            return None, 0
        self._read(self.fault.seconds)  # a last reading after the end
        most = max((count for _, count in self._times), default=0.0)
        last = next((when for when, count in self._times if count == most), 0.0)
        return None if self.fault.healthy_s is None else max(0.0, last - self.fault.healthy_s), int(most)

    def _read(self, seconds: float) -> None:
        self._next_s = seconds + POLL_S
        with suppress(OSError, HTTPException):  # /metrics may fail while the gang is down
            self._times.append((seconds, counted(self._port, RESUMED) - self._before))


def counted(port: int, name: str) -> float:
    """Return the sum of a metric's samples on /metrics: `RESUMED` streams so far, or `OPEN` requests now."""
    lines = page(port, "/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def show(result: dict[str, Any]) -> str:
    """Return the kills as a table."""
    keys = {"killed": "killed", "open then": "open", "resumed": "resumed", "cut": "cut", "different": "different"}
    keys |= {"200 again s": "healthy_s", "all resumed after s more": "resumed_s"}
    return columns(result["rounds"], keys)
