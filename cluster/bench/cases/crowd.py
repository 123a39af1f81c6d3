"""`aerie bench crowd`: a rank is killed while streams are open and a queue waits behind them; how soon do all go on?

It starts its own `aerie serve` on loopback, at float64. Whatever was killed, every request must end with the tokens of
an undisturbed run (law 1), and every open request must be submitted to the new gang as soon as that serves.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from cluster.bench.cases.faults import GANG, OPEN_TOKENS, Pulse, hurt, server_info, undisturbed, victim_of
from cluster.bench.report import first_difference, table
from cluster.bench.server import ServerProcess
from cluster.bench.streams import Stream, page, run_together

RESUMED = "aerie_resumed_streams_total"
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Size:
    """Requests that decode (on all ranks together), requests that queue, tokens of each, and how often a rank dies."""

    streams: int = 16
    queued: int = 100
    max_tokens: int = 64
    kills: int = 2


QUICK = Size(streams=4, queued=12, max_tokens=24, kills=1)


@dataclass(slots=True)
class Round:
    """One kill. Of the requests `open` at that moment, `resumed` were submitted to the new gang, the last of them
    `resumed_s` after /health was 200 again, and that was `healthy_s` after the kill. `cut` requests failed.
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
        """Whether a request was not resumed, failed or got other tokens, or the server was not seen healthy again."""
        return bool(self.cut or self.different or self.resumed < self.open or self.healthy_s is None)


def measure(size: Size, say: Callable[[str], None]) -> dict[str, Any]:
    """Kill a rank under this load, `size.kills` times; see `Round`."""
    rounds: list[Round] = []
    with ServerProcess([*GANG, f"max_running_requests={size.streams // 2}", "max_queue_wait_s=600"]) as server:
        say(f"crowd: ready after {server.ready_s:.1f} s")
        work = undisturbed(server, size.streams + size.queued, size.max_tokens)
        for number in range(size.kills):
            killed = f"rank {number % 2}"
            counter = Counter(server.port, size.streams, victim_of(server, server_info(server.port), killed))
            streams = run_together(server.port, work.model, work.prompts, size.max_tokens, counter.look)
            healthy_s, resumed_s, resumed = counter.settle()
            cut = sum(s.error is not None for s in streams)
            different = sum(
                s.error is None and first_difference(s.token_ids, w.token_ids) is not None
                for s, w in zip(streams, work.wanted, strict=True)
            )
            rounds.append(Round(killed, counter.open, resumed, healthy_s, resumed_s, cut, different))
            say(f"crowd: {rounds[-1]}")
    return {
        "rounds": [asdict(r) for r in rounds],
        "failed": sum(r.failed for r in rounds),
        "slowest_resumed_s": max((r.resumed_s or 0.0 for r in rounds), default=0.0),
    }


class Counter:
    """Kills a rank once enough streams have tokens, and then watches /health and the count of resumed streams."""

    def __init__(self, port: int, enough: int, victim: int) -> None:
        """`victim` is the process that dies once `enough` streams have tokens."""
        self.open = 0
        self._port, self._enough, self._victim = port, enough, victim
        self._before = resumed_streams(port)
        self._pulse = Pulse(port)
        self._times: list[tuple[float, float]] = []
        self._began = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def look(self, streams: list[Stream]) -> None:
        """Called repeatedly while the streams run."""
        if self._began or sum(len(s.token_ids) >= OPEN_TOKENS for s in streams) < self._enough:
            return
        self.open = sum(s.ended is None for s in streams)
        self._began = time.monotonic()
        hurt("kill", self._victim)
        self._pulse.begin()
        self._thread.start()

    def settle(self) -> tuple[float | None, float | None, int]:
        """Seconds until /health was 200 again, from then until the last stream was resumed, and how many were."""
        _, healthy = self._pulse.settle(expect_loss=True)
        self._over.set()
        if self._thread.ident is None:  # nothing was killed
            return None, None, 0
        self._thread.join()
        most = max((count for _, count in self._times), default=0.0)
        last = next((when for when, count in self._times if count == most), 0.0)
        return healthy, None if healthy is None else max(0.0, last - healthy), int(most)

    def _watch(self) -> None:
        while True:
            over = self._over.is_set()  # read once more after the end
            with suppress(OSError):  # /metrics may fail while the gang is down
                self._times.append((time.monotonic() - self._began, resumed_streams(self._port) - self._before))
            if over:
                return
            time.sleep(POLL_S)


def resumed_streams(port: int) -> float:
    """How many streams have been resumed so far, by /metrics."""
    lines = page(port, "/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(RESUMED))


def show(result: dict[str, Any]) -> str:
    """The kills as a table."""
    names = ("killed", "open", "resumed", "cut", "different", "healthy_s", "resumed_s")
    headers = ["killed", "open then", "resumed", "cut", "different", "200 again s", "all resumed after s more"]
    return table(headers, [[r[name] for name in names] for r in result["rounds"]])
