"""`aerie bench crowd`: kill a rank while streams are open and requests queue; measure how soon all requests continue.

At float64, every request must end with the tokens of an undisturbed run (law 1 of docs/architecture.md). Every request
that was open at the kill must be submitted again to the new gang (the ranks that replace those of the replica). The
bench measures how soon after the recovery that happens.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass
from http.client import HTTPException
from typing import Any

from cluster.bench.cases.faults import make_prompts
from cluster.bench.fault import GANG_SETTINGS, MIN_STREAM_TOKENS, Fault, run_without_fault
from cluster.bench.report import LogProgress, columns_table
from cluster.bench.server import ServerProcess
from cluster.bench.streams import ClientStream, get_page, stream_all, stream_errors

RESUMED_METRIC, OPEN_METRIC = "aerie_resumed_streams_total", "aerie_open_requests"
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Size:
    """The number of requests that decode (on all ranks together) and that queue, the tokens of each request, and the
    number of kills.
    """

    streams: int = 16
    queued: int = 100
    max_tokens: int = 64
    kills: int = 2


QUICK = Size(streams=4, queued=12, max_tokens=24, kills=1)


@dataclass(slots=True)
class KillRound:
    """One kill of the rank `killed`. `open` requests were unfinished at the kill; `resumed` requests were submitted
    again to the new gang. /health answered 200 again `healthy_s` seconds after the kill, and the last request was
    resumed `resumed_s` seconds after that (0.0 if before); both are None if /health did not. `cut` requests failed;
    `different` requests got other tokens than without a kill.
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


def measure(size: Size, log_progress: LogProgress) -> dict[str, Any]:
    """Kill a rank `size.kills` times while streams run. Return a `KillRound` for each kill, how many of these failed,
    and the longest `resumed_s`.
    """
    rounds: list[KillRound] = []

    def is_due(streams: list[ClientStream]) -> bool:
        """Return whether enough streams have tokens, and the server has received all unfinished requests."""
        decoding = sum(len(s.token_ids) >= MIN_STREAM_TOKENS for s in streams) >= size.streams
        return decoding and read_metric(server.port, OPEN_METRIC) >= sum(s.ended_at is None for s in streams)

    with ServerProcess([*GANG_SETTINGS, f"max_running_requests={size.streams // 2}", "max_queue_wait_s=600"]) as server:
        log_progress(f"crowd: ready after {server.ready_s:.1f} s")
        load = run_without_fault(server, make_prompts(size.streams + size.queued), size.max_tokens)
        for round_number in range(size.kills):
            victim = f"rank {round_number % 2}"
            counter = ResumeCounter(server.port, Fault(server, f"kill {victim}", is_due))
            streams = stream_all(server.port, load.model, load.prompts, load.max_tokens, counter.poll)
            resumed_s, resumed = counter.wait_until_healthy()
            fault, failed_count, different_count = (
                counter.fault,
                len(stream_errors(streams)),
                load.count_different(streams),
            )
            rounds.append(
                KillRound(
                    victim, fault.open_streams, resumed, fault.healthy_s, resumed_s, failed_count, different_count
                )
            )
            log_progress(f"crowd: {rounds[-1]}")
    return {
        "rounds": [asdict(kill_round) for kill_round in rounds],
        "failed": sum(kill_round.failed for kill_round in rounds),
        "slowest_resumed_s": max((kill_round.resumed_s or 0.0 for kill_round in rounds), default=0.0),
    }


class ResumeCounter:
    """Polls the number of resumed streams from the fault on."""

    def __init__(self, port: int, fault: Fault) -> None:
        self.fault = fault
        self._port, self._initial_count = port, read_metric(port, RESUMED_METRIC)
        self._next_poll_s = 0.0
        self._samples: list[tuple[float, float]] = []

    def poll(self, streams: list[ClientStream]) -> None:
        """Cause the fault once it is due, and then poll the count. Call it repeatedly while the streams run."""
        self.fault.trigger_if_due(streams)
        if self.fault.elapsed_s is not None and self.fault.elapsed_s >= self._next_poll_s:
            self._record_count(self.fault.elapsed_s)

    def wait_until_healthy(self) -> tuple[float | None, int]:
        """Wait until the server is healthy again. Return the seconds from this moment until the last stream was resumed
        (0.0 if it was resumed before), and the number of resumed streams. The seconds are None if the server did not
        become healthy again or the fault was never due.
        """
        self.fault.wait_until_healthy()
        if self.fault.elapsed_s is None:
            return None, 0
        self._record_count(self.fault.elapsed_s)  # a last reading after all streams have ended
        max_count = max((count for _, count in self._samples), default=0.0)
        last_growth_s = next((elapsed_s for elapsed_s, count in self._samples if count == max_count), 0.0)
        return None if self.fault.healthy_s is None else max(0.0, last_growth_s - self.fault.healthy_s), int(max_count)

    def _record_count(self, elapsed_s: float) -> None:
        self._next_poll_s = elapsed_s + POLL_S
        with suppress(OSError, HTTPException):  # /metrics may fail while the gang is down
            self._samples.append((elapsed_s, read_metric(self._port, RESUMED_METRIC) - self._initial_count))


def read_metric(port: int, metric: str) -> float:
    """Return the sum of all samples on /metrics whose names begin with `metric`, or 0.0 without such samples."""
    lines = get_page(port, "/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric))


def show(result: dict[str, Any]) -> str:
    """Return a table with one line for each kill."""
    keys = {"killed": "killed", "open then": "open", "resumed": "resumed", "cut": "cut", "different": "different"}
    keys |= {"200 again s": "healthy_s", "all resumed after s more": "resumed_s"}
    return columns_table(result["rounds"], keys)
