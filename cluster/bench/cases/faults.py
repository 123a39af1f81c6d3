"""`aerie bench faults`: processes of a server die, freeze or slow down while streams are open; what do clients see?

It starts its own `aerie serve` on loopback, hurts nothing else, and stops by itself. At float64 the tokens of every
stream must be those of an undisturbed run, since they depend on prompt, settings and seed alone (law 1).
"""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.bench.cases.demo import PROMPTS
from cluster.bench.report import first_difference, table
from cluster.bench.server import ServerProcess
from cluster.bench.streams import HOST, Prompt, Stream, page, run_together, served_model

GANG = ("dtype=float64", "tp_size=2", "attn_dp_size=2")
OPEN_TOKENS = 6  # every stream has this many before the fault
WAIT_S = 120.0
POLL_S = 0.02
SLOW_S = 12.0
SLOW_ON_S, SLOW_OFF_S = 0.01, 0.09  # a rank that runs a tenth of the time
REPLICA, ENGINE = "ServeReplica:", "-engine"  # what Ray calls the process of an engine replica


@dataclass(frozen=True, slots=True)
class Size:
    """How many streams of how many tokens, and the rounds: (ingress, faults, each a verb and its victim)."""

    streams: int = 16
    max_tokens: int = 192
    rounds: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("direct", ("kill rank 0", "kill rank 1") * 6 + ("freeze rank 1", "freeze rank 0", "slow rank 1")),
        ("resilient", ("kill rank 0", "kill rank 1", "kill replica", "kill replica") * 2),
    )


QUICK = Size(
    streams=8, max_tokens=96, rounds=(("direct", ("kill rank 1", "kill rank 0")), ("resilient", ("kill replica",)))
)


@dataclass(slots=True)
class Round:
    """One fault in a server with open streams. Seconds of health count from that moment; `named` is what was blamed."""

    ingress: str
    what: str
    cut: int = 0
    different: int = 0
    unhealthy_s: float | None = None
    healthy_s: float | None = None
    noticed_s: float | None = None
    pages_used: int | None = None
    restarts: int = 0
    named: str = ""
    errors: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether a client saw more than a pause, or pages stayed in use."""
        return bool(self.cut or self.different or self.pages_used)


def measure(size: Size, say: Callable[[str], None]) -> dict[str, Any]:
    """Run every round; see `Round` for what is noted of each."""
    rounds: list[Round] = []
    for ingress, todo in size.rounds:
        with ServerProcess([*GANG, f"ingress={ingress}"]) as server:
            say(f"faults: {ingress} ingress ready after {server.ready_s:.1f} s")
            work = undisturbed(server, size.streams, size.max_tokens)
            for what in todo:
                done = one_round(server, work, ingress, what)
                rounds.append(done)
                say(f"faults: {ingress}, {what}: cut {done.cut}, different {done.different}, {done.named}")
    return {
        "rounds": [asdict(r) for r in rounds],
        "kills": sum(r.what.startswith("kill") for r in rounds),
        "streams_cut": sum(r.cut for r in rounds),
        "streams_different": sum(r.different for r in rounds),
        "failed": sum(r.failed for r in rounds),
        "slowest_return_s": max((r.healthy_s or 0.0 for r in rounds), default=0.0),
        "identical": not any(r.different for r in rounds),
    }


@dataclass(frozen=True, slots=True)
class Work:
    """What every round streams, and the same streams without a fault (`wanted`)."""

    model: str
    prompts: Sequence[Prompt]
    max_tokens: int
    wanted: Sequence[Stream]


def undisturbed(server: ServerProcess, streams: int, max_tokens: int) -> Work:
    """Stream everything once.

    Raises:
        RuntimeError: a stream failed without a fault.
    """
    model, prompts = served_model(server.port), prompts_of(streams)
    wanted = run_together(server.port, model, prompts, max_tokens)
    if broken := [stream.error for stream in wanted if stream.error]:
        raise RuntimeError(f"the undisturbed run failed: {broken[0]}")
    return Work(model, prompts, max_tokens, wanted)


def prompts_of(count: int) -> list[Prompt]:
    """`count` prompts, every second one sampled at T=0.8 with its own seed."""
    texts = [prompt.text for prompt in PROMPTS]
    return [Prompt(texts[i // 2 % len(texts)], 0.8 if i % 2 else 0.0, 100 + i) for i in range(count)]


def one_round(server: ServerProcess, work: Work, ingress: str, what: str) -> Round:
    """Open the streams, cause the fault `what` once all of them have tokens, wait for their ends, and compare."""
    result = Round(ingress, what)
    before = server_info(server.port)
    verb, _, whom = what.partition(" ")
    victim = victim_of(server, before, whom)
    known = len(before.get("restarts", ()))
    pulse = Pulse(server.port)
    done = threading.Event()

    def look(streams: list[Stream]) -> None:
        if not done.is_set() and all(len(s.token_ids) >= OPEN_TOKENS or s.ended for s in streams):
            done.set()
            pulse.begin()
            hurt(verb, victim)

    streams = run_together(server.port, work.model, work.prompts, work.max_tokens, look)
    result.unhealthy_s, result.healthy_s = pulse.settle(expect_loss=verb != "slow")
    for stream, undisturbed in zip(streams, work.wanted, strict=True):
        result.cut += stream.error is not None
        if stream.error is not None:
            result.errors.append(stream.error)
        elif first_difference(stream.token_ids, undisturbed.token_ids) is not None:
            result.different += 1
    after = idle_info(server.port)
    result.pages_used = sum(rank["pages_used"] for rank in after.get("ranks", ()))
    losses = after.get("restarts", [])[known if whom != "replica" else 0 :]
    result.restarts = len(losses)
    if losses:
        loss = losses[-1]
        result.noticed_s = loss["noticed_s"]
        result.named = f"rank {loss['rank']} {loss['kind']} at step {loss['step']}, phase {loss['phase']}"
    if verb == "slow":
        result.named = "slowest: " + slowest(after.get("ranks", ()), before.get("ranks", ()))
    return result


def victim_of(server: ServerProcess, info: dict[str, Any], whom: str) -> int:
    """The pid of the process to hurt, a rank of `info` or the replica."""
    if whom == "replica":
        (engine,) = [p.pid for p in server.processes() if REPLICA in p.name and ENGINE in p.name]
        return engine
    return int(next(rank["pid"] for rank in info["ranks"] if rank["rank"] == int(whom.split()[1])))


def hurt(verb: str, pid: int) -> None:
    """Kill or freeze the process, or let it run a tenth of the time for a while (in a thread of its own)."""
    if verb == "kill":
        os.kill(pid, signal.SIGKILL)
    elif verb == "freeze":
        os.kill(pid, signal.SIGSTOP)
    else:
        threading.Thread(target=slow_down, args=(pid, SLOW_S), daemon=True).start()


def slow_down(pid: int, seconds: float) -> None:
    """Stop and continue the process so that it runs a tenth of the time."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(SLOW_OFF_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(SLOW_ON_S)
    except ProcessLookupError:
        return


class Pulse:
    """Polls /health from `begin` on, in a thread, and notes when it first failed and when it was 200 again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._began = 0.0
        self._sick: float | None = None
        self._well: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        """Start the clock and the polling."""
        self._began = time.monotonic()
        self._thread.start()

    def settle(self, expect_loss: bool) -> tuple[float | None, float | None]:
        """Both times, in seconds since `begin`; if a loss is expected, waits until the server is healthy again."""
        if not self._thread.ident:
            return None, None
        if expect_loss:
            self._thread.join(WAIT_S)
        self._stop.set()
        self._thread.join()
        return self._sick, self._well

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            now = time.monotonic() - self._began
            well = is_healthy(self._port)
            if not well and self._sick is None:
                self._sick = now
            if well and self._sick is not None:
                self._well = time.monotonic() - self._began
                return


def is_healthy(port: int) -> bool:
    """Whether /health answers 200."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def server_info(port: int) -> dict[str, Any]:
    """The answer of /server_info."""
    info: dict[str, Any] = json.loads(page(port, "/server_info"))
    return info


def idle_info(port: int) -> dict[str, Any]:
    """The same, once every rank reports and none runs a request or uses pages; after 20 s, as it is."""
    until = time.monotonic() + 20.0
    while True:
        info = server_info(port)
        ranks = info.get("ranks", [])
        if (ranks and not any(rank["pages_used"] or rank["running"] for rank in ranks)) or time.monotonic() > until:
            return info
        time.sleep(0.2)


def slowest(after: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> str:
    """The rank with the longest own time per step (collectives excluded), and its factor over the fastest rank's."""
    earlier = {rank["rank"]: rank for rank in before}
    own = {
        r["rank"]: (r["own_seconds"] - earlier[r["rank"]]["own_seconds"])
        / max(1, r["steps"] - earlier[r["rank"]]["steps"])
        for r in after
        if r["rank"] in earlier
    }
    worst = max(own, key=lambda rank: own[rank])
    others = [seconds for rank, seconds in own.items() if rank != worst]
    return f"rank {worst}, {own[worst] / max(1e-9, min(others, default=1.0)):.1f} times the fastest"


def show(result: dict[str, Any]) -> str:
    """The rounds as a table."""
    rows = [
        [r[name] for name in ("ingress", "what", "cut", "different", "noticed_s", "unhealthy_s", "healthy_s", "named")]
        for r in result["rounds"]
    ]
    headers = ["ingress", "done", "cut", "different", "noticed s", "503 after s", "200 again s", "named"]
    return f"{table(headers, rows)}\n\n{result['kills']} kills, {result['streams_cut']} streams cut"
