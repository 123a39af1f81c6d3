"""`aerie bench faults`: kill, freeze or slow down processes of a server with open streams; measure what clients see.

It starts its own `aerie serve` on loopback, touches no other process, and ends by itself. At float64, every stream must
have the tokens of an undisturbed run: tokens depend only on prompt, settings and seed (docs/architecture.md, law 1).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.bench.cases.demo import PROMPTS
from cluster.bench.fault import GANG, OPEN_TOKENS, Fault, StreamLoad, idle_info, undisturbed
from cluster.bench.report import Say, columns
from cluster.bench.server import ServerProcess
from cluster.bench.streams import Prompt, errors_of, run_together


@dataclass(frozen=True, slots=True)
class Size:
    """The number of streams and the tokens per stream. Each round is a pair: the kind of the server's ingress, and the
    faults that the round plants. A fault is a verb and a victim, such as "kill rank 0".
    """

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
class FaultRound:
    """The result of one fault. `cut` streams failed; `different` streams got other tokens. For `unhealthy_s` and
    `healthy_s` see `Fault`. `noticed_s` is how long the server took to notice, by its own report. `named` is the rank
    that the server blames or, if a rank was slowed down, the slowest rank.
    """

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


def measure(size: Size, say: Say) -> dict[str, Any]:
    """Run every round. Return a `FaultRound` for each fault, and sums over all of them."""
    rounds: list[FaultRound] = []
    for ingress, todo in size.rounds:
        with ServerProcess([*GANG, f"ingress={ingress}"]) as server:
            say(f"faults: {ingress} ingress ready after {server.ready_s:.1f} s")
            work = undisturbed(server, prompts_of(size.streams), size.max_tokens)
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


def prompts_of(count: int) -> list[Prompt]:
    """Return `count` prompts; every second one is sampled at T=0.8 with a seed of its own."""
    texts = [prompt.text for prompt in PROMPTS]
    return [Prompt(texts[i // 2 % len(texts)], 0.8 if i % 2 else 0.0, 100 + i) for i in range(count)]


def one_round(server: ServerProcess, work: StreamLoad, ingress: str, what: str) -> FaultRound:
    """Open the streams, cause the fault `what` once every stream has tokens, wait for the end of all streams, and
    compare their tokens.
    """
    fault = Fault(server, what, lambda streams: all(len(s.token_ids) >= OPEN_TOKENS or s.ended for s in streams))
    streams = run_together(server.port, work.model, work.prompts, work.max_tokens, fault.look)
    fault.settle()
    result = FaultRound(ingress, what, different=work.different(streams), errors=errors_of(streams))
    result.cut = len(result.errors)
    result.unhealthy_s, result.healthy_s = fault.unhealthy_s, fault.healthy_s
    after = idle_info(server.port)
    result.pages_used = sum(rank["pages_used"] for rank in after.get("ranks", ()))
    losses = fault.losses(after)
    result.restarts = len(losses)
    if losses:
        loss = losses[-1]
        result.noticed_s = loss["noticed_s"]
        result.named = f"rank {loss['rank']} {loss['kind']} at step {loss['step']}, phase {loss['phase']}"
    if fault.verb == "slow":
        result.named = "slowest: " + slowest(after.get("ranks", ()), fault.before.get("ranks", ()))
    return result


def slowest(after: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> str:
    """Return which rank took the longest per step, collectives excluded, and how many times longer than the fastest."""
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
    """Return the rounds as a table."""
    keys = {"ingress": "ingress", "done": "what", "cut": "cut", "different": "different", "noticed s": "noticed_s"}
    keys |= {"503 after s": "unhealthy_s", "200 again s": "healthy_s", "named": "named"}
    return f"{columns(result['rounds'], keys)}\n\n{result['kills']} kills, {result['streams_cut']} streams cut"
