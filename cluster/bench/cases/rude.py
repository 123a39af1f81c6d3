"""`aerie bench rude`: do abusive clients disturb ordinary streams?

Eight streams of an `aerie serve` on loopback are read all the time. After a quiet phase, another process does one kind
of abuse per phase. The abusing process runs in its own session, because Linux shares processors among sessions
(autogroups): in the readers' session it would take their share. Each phase reports the longest pause between two events
of any stream. It also reports the pauses above 0.1 s per minute, because the longest pause grows with the length of a
phase. The quiet phase is the baseline without load. Phases with hostile grammars are compared with a phase of ordinary
requests, with the same number of requests at once.
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

from cluster.bench.cases.faults import prompts_of
from cluster.bench.fault import REPLICA, server_info
from cluster.bench.goals import Goal
from cluster.bench.report import Say, machine, records
from cluster.bench.rudeness import ACTS, AnswerTally, act
from cluster.bench.server import TWO_RANKS, ServerProcess
from cluster.bench.streams import HOST, ClientStream, Prompt, served_model
from cluster.bench.wire import drive

LIMIT_S = 0.5  # the longest pause that a stream may have
LONG_S = 0.1  # longer pauses are counted
OPEN_TOKENS = 4  # every stream has this many before the first phase


@dataclass(frozen=True, slots=True)
class Size:
    """The number of streams, the tokens after which a stream ends and is opened again, the seconds of the quiet phase,
    and how often each of the `ACTS` is done.
    """

    streams: int = 8
    max_tokens: int = 2048
    quiet_s: float = 20.0
    times: tuple[int, ...] = (200, 100, 50, 500, 1000, 1000, 1000)


QUICK = Size(quiet_s=5.0, times=(50, 16, 8, 50, 100, 80, 40))


@dataclass(slots=True)
class Phase:
    """A phase: `what` kind of abuse, or none, done `count` times. `pauses` has the longest pause of each stream, in
    seconds. `long` counts pauses above `LONG_S` of all streams, `cut` failed streams. `replaced`: a rank, the gang or
    the replica was replaced.
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
        broken = any(status >= 500 and status != 503 for status in self.tally.statuses)
        rude = self.tally.not_json or self.tally.unanswered or broken
        return bool(self.cut or self.replaced or rude)


class Listener:
    """A client with a thread of its own, which reads streams, one after another."""

    def __init__(self, port: int, model: str, prompt: Prompt, max_tokens: int) -> None:
        self._port, self._model, self._max_tokens = port, model, max_tokens
        self._stop = threading.Event()
        self._last: float | None = None  # time of the current stream's last event; None between streams
        self.longest, self.long = 0.0, 0
        self.errors: list[str] = []
        self.stream = ClientStream(prompt)
        threading.Thread(target=self._run, daemon=True).start()

    def take_pauses(self) -> tuple[float, int]:
        """Return the longest pause since the last call, an unfinished one included, and the number of long pauses."""
        last, longest, long = self._last, self.longest, self.long
        self.longest, self.long = 0.0, 0
        return max(longest, time.perf_counter() - last if last is not None else 0.0), long

    def stop(self) -> None:
        """Make the thread stop at the current stream's next event."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.stream = ClientStream(self.stream.prompt, heard=self.heard)
            self.stream.run(self._port, self._model, self._max_tokens)
            self._last = None
            if self.stream.error is not None and not self._stop.is_set():
                self.errors.append(self.stream.error)
                time.sleep(0.2)

    def heard(self) -> None:
        """Record an event of the stream. After `stop`, raise ValueError, which ends the stream."""
        now = time.perf_counter()
        if self._last is not None:
            self.longest = max(self.longest, now - self._last)
            self.long += now - self._last > LONG_S
        self._last = now
        if self._stop.is_set():
            raise ValueError("stopped")


def measure(size: Size, say: Say) -> dict[str, Any]:
    """Run all phases against one server; return the figures of each `Phase`."""
    context = multiprocessing.get_context("spawn")
    with ServerProcess(TWO_RANKS) as server, ProcessPoolExecutor(1, context, initializer=os.setsid) as other:
        say(f"rude: ready after {server.ready_s:.1f} s")
        model = served_model(server.port)
        listeners = [Listener(server.port, model, p, size.max_tokens) for p in prompts_of(size.streams)]
        other.submit(time.perf_counter).result()  # starts the process now, not during a measured phase
        _wait(lambda: all(len(listener.stream.token_ids) >= OPEN_TOKENS for listener in listeners))
        phases = []

        def abuse(what: str, count: int) -> AnswerTally:
            if not count:
                time.sleep(size.quiet_s)
                return AnswerTally()
            return other.submit(drive, act, what, server.port, model, count).result()

        for what, count in (("nothing", 0), *zip(ACTS, size.times, strict=True)):
            phase = _phase(server, listeners, what, count, abuse)
            phases.append(phase)
            tally = phase.tally
            paused = f"longest pause {phase.longest_s:.2f} s, {phase.long} long, cut {phase.cut}"
            say(f"rude: {count} {what}: {paused}, {tally.statuses}")
        for listener in listeners:
            listener.stop()
    errors = [error for listener in listeners for error in listener.errors]
    return {
        "machine": machine(),
        "streams": size.streams,
        "limit_s": LIMIT_S,
        "quiet_s": phases[0].longest_s,
        "phases": [_facts(phase) for phase in phases],
        "errors": errors[:5],
        "failed": sum(phase.failed for phase in phases[1:]),
    }


def _phase(
    server: ServerProcess,
    listeners: Sequence[Listener],
    what: str,
    count: int,
    abuse: Callable[[str, int], AnswerTally],
) -> Phase:
    before = _identity(server)
    cuts = sum(len(listener.errors) for listener in listeners)
    for listener in listeners:
        listener.take_pauses()
    began = time.perf_counter()
    tally = abuse(what, count)
    time.sleep(1.0)  # effects may be delayed
    taken = [listener.take_pauses() for listener in listeners]
    seconds = time.perf_counter() - began
    cuts = sum(len(listener.errors) for listener in listeners) - cuts
    pauses, long = [longest for longest, _ in taken], sum(count for _, count in taken)
    return Phase(what, count, seconds, pauses, long, cuts, _identity(server) != before, tally)


def _identity(server: ServerProcess) -> Any:
    """Return a value that changes if a rank, the gang or the replica is replaced."""
    try:
        info = server_info(server.port)
    except (OSError, json.JSONDecodeError) as error:
        return f"{HOST} does not answer: {error}"
    replicas = sorted(process.pid for process in server.processes() if process.name.startswith(REPLICA))
    ranks = [rank["pid"] for rank in info.get("ranks", ())]
    return info.get("epoch"), len(info.get("restarts", ())), ranks, replicas


def _wait(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError(f"the streams gave too few tokens in {within_s:.0f} s")
        time.sleep(0.05)


def _facts(phase: Phase) -> dict[str, Any]:
    found = asdict(phase)
    tally = found.pop("tally")
    return {
        **found,
        **tally,
        "longest_pause_s": phase.longest_s,
        "long_a_minute": 60 * phase.long / phase.seconds,
        "statuses": {str(status): count for status, count in sorted(phase.tally.statuses.items())},
        "failed": phase.failed,
    }


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the goal of each abuse: the longest pause between two events of any stream, in seconds."""
    rude = result["phases"][1:]
    return [Goal(f"longest pause beside {p['what']}, s", p["longest_pause_s"], result["limit_s"]) for p in rude]


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
    verdict = f"{result['streams']} streams; a pause may last {result['limit_s']} s"
    errors = "".join(f"\n  {error}" for error in result["errors"])
    return f"{records(rows)}\n\n{verdict}{errors}"
