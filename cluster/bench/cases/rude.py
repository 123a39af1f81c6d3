"""`aerie bench rude`: do abusive clients disturb ordinary streams?

Eight streams of an `aerie serve` on loopback are read all the time. After a quiet phase, another process does one kind
of abuse per phase. The abusing process runs in its own session, because Linux divides processor time among sessions
(autogroups): in the readers' session it would take their share. Each phase reports the longest pause between two events
of any stream. It also reports how many pauses per minute are longer than 0.1 s, because the longest pause grows with
the length of a phase. The quiet phase is the baseline without load. For hostile grammars, the baseline is the phase of
ordinary requests, which sends as many requests at once.
"""

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.bench.cases.faults import make_prompts
from cluster.bench.fault import REPLICA_PREFIX, server_info
from cluster.bench.goals import Goal
from cluster.bench.report import LogProgress, machine_info, records_table
from cluster.bench.rudeness import ABUSE_KINDS, AnswerTally, run_abuse
from cluster.bench.server import TWO_RANKS, ServerProcess
from cluster.bench.streams import HOST, ClientStream, Prompt, served_model
from cluster.bench.wire import run_coroutine

MAX_PAUSE_S = 0.5  # the longest pause that a stream may have
LONG_PAUSE_S = 0.1  # longer pauses are counted
MIN_STREAM_TOKENS = 4  # the first phase begins when every stream has this many


@dataclass(frozen=True, slots=True)
class Size:
    """The number of streams, the tokens after which a stream ends and is opened again, the seconds of the quiet phase,
    and how often each of the `ABUSE_KINDS` is done.
    """

    streams: int = 8
    max_tokens: int = 2048
    quiet_s: float = 20.0
    times: tuple[int, ...] = (200, 100, 50, 500, 1000, 1000, 1000)


QUICK = Size(quiet_s=5.0, times=(50, 16, 8, 50, 100, 80, 40))


@dataclass(slots=True)
class Phase:
    """One phase. `what` is the kind of abuse, or "nothing", and `count` is how often it was done. `pauses` has the
    longest pause of each stream, in seconds. `long` counts the pauses of all streams above `LONG_PAUSE_S`, and `cut`
    the streams that failed. `replaced` says that a rank, the gang (all ranks of the replica) or the replica was
    replaced. `tally` counts the answers to the abusive requests.
    """

    what: str
    count: int
    seconds: float = 0.0
    pauses: list[float] = field(default_factory=list)
    long: int = 0
    cut: int = 0
    replaced: bool = False
    tally: AnswerTally = field(default_factory=AnswerTally)

    @property
    def longest_s(self) -> float:
        """The longest pause of any stream."""
        return max(self.pauses, default=0.0)

    @property
    def failed(self) -> bool:
        """Whether the phase failed: a stream failed, a process was replaced, an answer was missing or not JSON, or a
        server error was not 503 (full). Long pauses are judged by `goals` instead.
        """
        server_error = any(status >= 500 and status != 503 for status in self.tally.statuses)
        bad_answers = self.tally.not_json or self.tally.unanswered or server_error
        return bool(self.cut or self.replaced or bad_answers)


class Listener:
    """A client whose thread reads streams of one prompt, one after another, and measures pauses between events."""

    def __init__(self, port: int, model: str, prompt: Prompt, max_tokens: int) -> None:
        self._port, self._model, self._max_tokens = port, model, max_tokens
        self._stopped = threading.Event()
        self._last_event_at: float | None = None  # time of the current stream's last event; None between streams
        self.longest_pause_s, self.long_pauses = 0.0, 0
        self.errors: list[str] = []
        self.stream = ClientStream(prompt)
        threading.Thread(target=self._run, daemon=True).start()

    def take_pauses(self) -> tuple[float, int]:
        """Return the longest pause since the last call, a pause that still lasts included, and the number of pauses
        above `LONG_PAUSE_S` that have ended since.
        """
        last_event_at, longest_pause_s, long_pauses = self._last_event_at, self.longest_pause_s, self.long_pauses
        self.longest_pause_s, self.long_pauses = 0.0, 0
        return max(
            longest_pause_s, time.perf_counter() - last_event_at if last_event_at is not None else 0.0
        ), long_pauses

    def stop(self) -> None:
        """Make the thread stop at the current stream's next event."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.stream = ClientStream(self.stream.prompt, on_event=self.on_event)
            self.stream.run(self._port, self._model, self._max_tokens)
            self._last_event_at = None
            if self.stream.error is not None and not self._stopped.is_set():
                self.errors.append(self.stream.error)
                time.sleep(0.2)

    def on_event(self) -> None:
        """Record an event of the stream. After `stop`, raise ValueError, which ends the stream."""
        now = time.perf_counter()
        if self._last_event_at is not None:
            self.longest_pause_s = max(self.longest_pause_s, now - self._last_event_at)
            self.long_pauses += now - self._last_event_at > LONG_PAUSE_S
        self._last_event_at = now
        if self._stopped.is_set():
            raise ValueError("stopped")


def measure(size: Size, log_progress: LogProgress) -> dict[str, Any]:
    """Run all phases against one server. Return the figures of each `Phase`, and how many phases with abuse failed."""
    context = multiprocessing.get_context("spawn")
    with ServerProcess(TWO_RANKS) as server, ProcessPoolExecutor(1, context, initializer=os.setsid) as abuse_process:
        log_progress(f"rude: ready after {server.ready_s:.1f} s")
        model = served_model(server.port)
        listeners = [Listener(server.port, model, prompt, size.max_tokens) for prompt in make_prompts(size.streams)]
        abuse_process.submit(time.perf_counter).result()  # starts the process now, not during a measured phase
        _wait_until(lambda: all(len(listener.stream.token_ids) >= MIN_STREAM_TOKENS for listener in listeners))
        phases = []

        def abuse(abuse_name: str, count: int) -> AnswerTally:
            if not count:
                time.sleep(size.quiet_s)
                return AnswerTally()
            return abuse_process.submit(run_coroutine, run_abuse, abuse_name, server.port, model, count).result()

        for abuse_name, count in (("nothing", 0), *zip(ABUSE_KINDS, size.times, strict=True)):
            phase = _phase(server, listeners, abuse_name, count, abuse)
            phases.append(phase)
            tally = phase.tally
            pause_text = f"longest pause {phase.longest_s:.2f} s, {phase.long} long, cut {phase.cut}"
            log_progress(f"rude: {count} {abuse_name}: {pause_text}, {tally.statuses}")
        for listener in listeners:
            listener.stop()
    errors = [error for listener in listeners for error in listener.errors]
    return {
        "machine": machine_info(),
        "streams": size.streams,
        "limit_s": MAX_PAUSE_S,
        "quiet_s": phases[0].longest_s,
        "phases": [_phase_figures(phase) for phase in phases],
        "errors": errors[:5],
        "failed": sum(phase.failed for phase in phases[1:]),
    }


def _phase(
    server: ServerProcess,
    listeners: Sequence[Listener],
    abuse_name: str,
    count: int,
    abuse: Callable[[str, int], AnswerTally],
) -> Phase:
    before = _process_identity(server)
    error_count = sum(len(listener.errors) for listener in listeners)
    for listener in listeners:
        listener.take_pauses()
    started_at = time.perf_counter()
    tally = abuse(abuse_name, count)
    time.sleep(1.0)  # effects may be delayed
    pause_records = [listener.take_pauses() for listener in listeners]
    seconds = time.perf_counter() - started_at
    error_count = sum(len(listener.errors) for listener in listeners) - error_count
    pauses, long_pauses = (
        [longest_pause_s for longest_pause_s, _ in pause_records],
        sum(count for _, count in pause_records),
    )
    return Phase(
        abuse_name, count, seconds, pauses, long_pauses, error_count, _process_identity(server) != before, tally
    )


def _process_identity(server: ServerProcess) -> Any:
    """Return a value that changes if a rank, the gang or a replica is replaced, or if the server stops answering."""
    try:
        info = server_info(server.port)
    except (OSError, json.JSONDecodeError) as error:
        return f"{HOST} does not answer: {error}"
    replicas = sorted(process.pid for process in server.processes() if process.name.startswith(REPLICA_PREFIX))
    ranks = [rank["pid"] for rank in info.get("ranks", ())]
    return info.get("epoch"), len(info.get("restarts", ())), ranks, replicas


def _wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the streams gave too few tokens in {timeout_s:.0f} s")
        time.sleep(0.05)


def _phase_figures(phase: Phase) -> dict[str, Any]:
    figures = asdict(phase)
    tally = figures.pop("tally")
    return {
        **figures,
        **tally,
        "longest_pause_s": phase.longest_s,
        "long_a_minute": 60 * phase.long / phase.seconds,
        "statuses": {str(status): count for status, count in sorted(phase.tally.statuses.items())},
        "failed": phase.failed,
    }


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return a goal for each kind of abuse: a bound on the longest pause between two events of any stream."""
    abuse_phases = result["phases"][1:]
    return [
        Goal(f"longest pause beside {phase['what']}, s", phase["longest_pause_s"], result["limit_s"])
        for phase in abuse_phases
    ]


def show(result: dict[str, Any]) -> str:
    """Return the phases as a table."""
    rows = [
        {
            "times": phase["count"],
            "what": phase["what"],
            "took s": phase["seconds"],
            "longest pause s": phase["longest_pause_s"],
            "over 0.1 s a minute": phase["long_a_minute"],
            "cut": phase["cut"],
            "replaced": "YES" if phase["replaced"] else "no",
            "statuses": ", ".join(f"{status}: {count}" for status, count in phase["statuses"].items()) or "-",
            "no answer": phase["unanswered"],
            "no JSON": phase["not_json"],
            "good": phase["what"] == "nothing" or not (phase["failed"] or phase["longest_pause_s"] > result["limit_s"]),
        }
        for phase in result["phases"]
    ]
    limit_text = f"{result['streams']} streams; a pause may last {result['limit_s']} s"
    errors = "".join(f"\n  {error}" for error in result["errors"])
    return f"{records_table(rows)}\n\n{limit_text}{errors}"
