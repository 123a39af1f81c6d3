"""`aerie bench strain --model DIR`: serve a model whose steps take seconds, on a machine that is otherwise busy.

It starts its own `aerie serve` on loopback and some processes that burn CPU. A slow step is not a fault: no gang may be
lost while work goes on. A rank stopped with SIGSTOP is a fault: the server must notice it and name the rank.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.bench.fault import Fault, idle_info
from cluster.bench.pair import Pair
from cluster.bench.report import Say, table
from cluster.bench.server import ServerProcess
from cluster.bench.streams import ClientStream, Prompt, errors_of, run_together, served_model

BURN = "while True: pass"
NO_DRAFT = ("speculative_algorithm=null", "tp_size=1", "attn_dp_size=1")
NO_FAULT = "nothing"
PATIENCE_S = 900.0  # timeout of a client, because a first token may take minutes


@dataclass(frozen=True, slots=True)
class Size:
    """The number of streams, their tokens and prompt length, the length of one more, long prompt, the number of busy
    loops, and the rounds.
    """

    streams: int = 8
    max_tokens: int = 24
    prompt_tokens: int = 60
    long_prompt_tokens: int = 2000
    busy: int = 3
    rounds: tuple[str, ...] = (NO_FAULT, "freeze rank 0") * 2


QUICK = Size(streams=4, max_tokens=8, long_prompt_tokens=400, rounds=(NO_FAULT, "freeze rank 0"))


@dataclass(slots=True)
class StrainRound:
    """The result of one round. `asked` requests were sent; `answered` of them got an answer. `losses` counts lost
    gangs. `unhealthy_s` and `healthy_s` count from the moment when the rank was stopped. `named` is the rank that the
    server blames.
    """

    what: str
    answered: int = 0
    asked: int = 0
    losses: int = 0
    longest_pause_s: float = 0.0
    long_prompt_first_s: float | None = None
    unhealthy_s: float | None = None
    healthy_s: float | None = None
    named: str = ""
    errors: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether a request was not answered, or the number of lost gangs differs from the number of faults."""
        expected = 0 if self.what == NO_FAULT else 1
        return self.answered < self.asked or self.losses != expected


def measure(target: str, dtype: str, size: Size, say: Say) -> dict[str, Any]:
    """Run every round on one server of the model in folder `target`, without a draft. Return a `StrainRound` for each
    round.
    """
    pair = Pair(target)
    short = pair.texts(size.streams, size.prompt_tokens)
    longs = pair.texts(len(size.rounds), size.long_prompt_tokens)  # one per round, so that none is in the radix tree
    patient = f"max_queue_wait_s={PATIENCE_S}"  # as long as the clients wait: refusals are not tested here
    settings = [*NO_DRAFT, f"model_path={target}", "model_id=strained", f"dtype={dtype}", patient]
    rounds = []
    with ServerProcess(settings) as server, busy_loops(size.busy):
        say(f"strain: ready after {server.ready_s:.1f} s")
        for what, long in zip(size.rounds, longs, strict=True):
            done = one_round(server, size, short, long, what)
            rounds.append(done)
            say(f"strain: {what}: {done.answered} of {done.asked} answered, {done.losses} lost {done.named}")
    return {"rounds": [asdict(r) for r in rounds], "start_s": server.ready_s, "failed": sum(r.failed for r in rounds)}


def one_round(server: ServerProcess, size: Size, short: list[str], long: str, what: str) -> StrainRound:
    """Open all streams; once each short prompt has a token, stop the rank if `what` says so; wait until all streams
    have ended.
    """
    prompts = [Prompt(text, 0.0, i) for i, text in enumerate([*short, long])]
    watch = Pauses(len(prompts))
    fault = Fault(server, what, lambda streams: what != NO_FAULT and all(s.token_ids or s.ended for s in streams[:-1]))

    def look(streams: list[ClientStream]) -> None:
        watch.look(streams)
        fault.look(streams)

    streams = run_together(server.port, served_model(server.port), prompts, size.max_tokens, look, timeout_s=PATIENCE_S)
    fault.settle()
    result = StrainRound(what, asked=len(prompts), longest_pause_s=watch.longest_s, errors=errors_of(streams))
    result.answered = result.asked - len(result.errors)
    result.long_prompt_first_s = streams[-1].first_s
    result.unhealthy_s, result.healthy_s = fault.unhealthy_s, fault.healthy_s
    losses = fault.losses(idle_info(server.port))
    result.losses = len(losses)
    if losses:
        result.named = f"rank {losses[-1]['rank']} {losses[-1]['kind']}: {losses[-1]['reason']}"
    return result


class Pauses:
    """Tracks the longest pause between the tokens of a stream; the time to the first token does not count."""

    def __init__(self, streams: int) -> None:
        self._seen = [(0, 0.0)] * streams
        self.longest_s = 0.0

    def look(self, streams: list[ClientStream]) -> None:
        """Record which streams have grown since the last call."""
        for at, stream in enumerate(streams):
            count, when = len(stream.token_ids), stream.seconds
            if count > self._seen[at][0]:
                if self._seen[at][0]:
                    self.longest_s = max(self.longest_s, when - self._seen[at][1])
                self._seen[at] = (count, when)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run `count` processes that burn a core each, for the duration of the `with` block."""
    loops = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def show(result: dict[str, Any]) -> str:
    """Return the rounds as a table."""
    columns = {
        "done": "what",
        "answered": "answered",
        "of": "asked",
        "gangs lost": "losses",
        "longest pause s": "longest_pause_s",
        "long prompt's first token s": "long_prompt_first_s",
        "503 after s": "unhealthy_s",
        "200 again s": "healthy_s",
        "named": "named",
    }
    rows = [[r[key] for key in columns.values()] for r in result["rounds"]]
    return f"{table(list(columns), rows)}\n\nready after {result['start_s']:.1f} s"
