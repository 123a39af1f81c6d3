"""`aerie bench faults`: kill, freeze or slow down processes of a server with open streams; measure what clients see.

It starts its own `aerie serve` on loopback, touches no other process, and ends by itself. At float64, every stream must
have the tokens of an undisturbed run: tokens depend only on prompt, settings and seed (docs/architecture.md, law 1).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.bench.cases.demo import PROMPTS
from cluster.bench.fault import GANG_SETTINGS, MIN_STREAM_TOKENS, Fault, StreamLoad, info_when_idle, run_without_fault
from cluster.bench.report import LogProgress, columns_table
from cluster.bench.server import ServerProcess
from cluster.bench.streams import Prompt, stream_all, stream_errors


@dataclass(frozen=True, slots=True)
class Size:
    """The number of streams and the tokens per stream. For each item of `rounds`, a server is started. An item has the
    server's setting `ingress`, and the faults to cause, one after the other. A fault is a verb and a victim, such as
    "kill rank 0".
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
    """The result of the fault `what`. `cut` streams failed; `different` streams got other tokens. `unhealthy_s` counts
    the seconds from the fault until /health failed, and `healthy_s` until it answered 200 again. `noticed_s` counts the
    seconds from the last sign of life of the lost rank until the server noticed the loss, as the server reports. The
    seconds are None if there was no such event. `pages_used` counts the pages in use at the end, and `restarts` the
    losses of ranks since the fault. `named` is the rank that the server blames or, if a rank was slowed down, the
    slowest rank.
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


def measure(size: Size, log_progress: LogProgress) -> dict[str, Any]:
    """Start a server for each of `size.rounds` and cause its faults. Return the result for JSON: under `rounds` the
    fields of a `FaultRound` for each fault, and totals over all rounds.
    """
    rounds: list[FaultRound] = []
    for ingress, fault_names in size.rounds:
        with ServerProcess([*GANG_SETTINGS, f"ingress={ingress}"]) as server:
            log_progress(f"faults: {ingress} ingress ready after {server.ready_s:.1f} s")
            load = run_without_fault(server, make_prompts(size.streams), size.max_tokens)
            for fault_name in fault_names:
                result = run_round(server, load, ingress, fault_name)
                rounds.append(result)
                log_progress(
                    f"faults: {ingress}, {fault_name}: cut {result.cut}, different {result.different}, {result.named}"
                )
    return {
        "rounds": [asdict(fault_round) for fault_round in rounds],
        "kills": sum(fault_round.what.startswith("kill") for fault_round in rounds),
        "streams_cut": sum(fault_round.cut for fault_round in rounds),
        "streams_different": sum(fault_round.different for fault_round in rounds),
        "failed": sum(fault_round.failed for fault_round in rounds),
        "slowest_return_s": max((fault_round.healthy_s or 0.0 for fault_round in rounds), default=0.0),
        "identical": not any(fault_round.different for fault_round in rounds),
    }


def make_prompts(count: int) -> list[Prompt]:
    """Return `count` prompts: in turns a greedy one, and one sampled at temperature 0.8 with a seed of its own."""
    texts = [prompt.text for prompt in PROMPTS]
    return [Prompt(texts[i // 2 % len(texts)], 0.8 if i % 2 else 0.0, 100 + i) for i in range(count)]


def run_round(server: ServerProcess, load: StreamLoad, ingress: str, fault_name: str) -> FaultRound:
    """Open the streams, and cause the fault `fault_name` once every stream has tokens. Wait for the end of all streams,
    and compare their tokens with those of the run without a fault.
    """
    fault = Fault(
        server, fault_name, lambda streams: all(len(s.token_ids) >= MIN_STREAM_TOKENS or s.ended_at for s in streams)
    )
    streams = stream_all(server.port, load.model, load.prompts, load.max_tokens, fault.trigger_if_due)
    fault.wait_until_healthy()
    result = FaultRound(ingress, fault_name, different=load.count_different(streams), errors=stream_errors(streams))
    result.cut = len(result.errors)
    result.unhealthy_s, result.healthy_s = fault.unhealthy_s, fault.healthy_s
    info_after = info_when_idle(server.port)
    result.pages_used = sum(rank["pages_used"] for rank in info_after.get("ranks", ()))
    failures = fault.gang_failures(info_after)
    result.restarts = len(failures)
    if failures:
        failure = failures[-1]
        result.noticed_s = failure["noticed_s"]
        result.named = f"rank {failure['rank']} {failure['kind']} at step {failure['step']}, phase {failure['phase']}"
    if fault.verb == "slow":
        result.named = "slowest: " + slowest(info_after.get("ranks", ()), fault.info_before.get("ranks", ()))
    return result


def slowest(after: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> str:
    """Return a text: which rank took the longest per step between the readings `before` and `after`, collectives
    excluded, and how many times as long as the fastest rank.
    """
    before_by_rank = {rank["rank"]: rank for rank in before}
    seconds_per_step = {
        rank_info["rank"]: (rank_info["own_seconds"] - before_by_rank[rank_info["rank"]]["own_seconds"])
        / max(1, rank_info["steps"] - before_by_rank[rank_info["rank"]]["steps"])
        for rank_info in after
        if rank_info["rank"] in before_by_rank
    }
    slowest_rank = max(seconds_per_step, key=lambda rank: seconds_per_step[rank])
    other_seconds = [seconds for rank, seconds in seconds_per_step.items() if rank != slowest_rank]
    return (
        f"rank {slowest_rank}, {seconds_per_step[slowest_rank] / max(1e-9, min(other_seconds, default=1.0)):.1f} times "
        f"the fastest"
    )


def show(result: dict[str, Any]) -> str:
    """Return a table with one line for each fault, and below it the number of kills and of cut streams."""
    keys = {"ingress": "ingress", "done": "what", "cut": "cut", "different": "different", "noticed s": "noticed_s"}
    keys |= {"503 after s": "unhealthy_s", "200 again s": "healthy_s", "named": "named"}
    return f"{columns_table(result['rounds'], keys)}\n\n{result['kills']} kills, {result['streams_cut']} streams cut"
