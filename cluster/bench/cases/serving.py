"""`aerie bench serving`: start-up time, latency, throughput and memory of `aerie serve`."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.bench.cases.demo import PROMPTS
from cluster.bench.goals import Goal
from cluster.bench.pair import ModelPair
from cluster.bench.processes import memory_usage
from cluster.bench.report import LogProgress, machine_info, median, table
from cluster.bench.server import ServerProcess
from cluster.bench.streams import (
    ClientStream,
    Prompt,
    accept_length,
    first_token_ms,
    served_model,
    stream_all,
    total_tokens_per_second,
)

GOAL_START_S = 25.0


@dataclass(frozen=True, slots=True)
class Size:
    """The number of server starts, the rounds of streams per start, and the tokens per stream."""

    starts: int = 3
    rounds: int = 5
    new_tokens: int = 192


QUICK = Size(starts=1, rounds=1, new_tokens=32)


def measure(pair: ModelPair, size: Size = Size(), log_progress: LogProgress = print) -> dict[str, Any]:
    """Start the server several times; after each start, stream and read its memory. Return the figures, JSON-ready. The
    memory is that of the last start.
    """
    starts, rounds = [], list[list[ClientStream]]()
    for number in range(size.starts):
        log_progress(f"serving: start {number + 1} of {size.starts}")
        starts.append(_measure_start(pair, size, rounds))
    streams = [stream for round_streams in rounds for stream in round_streams]
    return {
        "what": "serving",
        "machine": machine_info(),
        "starts": size.starts,
        "ready_seconds": median([start["ready"] for start in starts]),
        "first_answer_seconds": median([start["answered"] for start in starts]),
        "streams_at_once": len(PROMPTS),
        "new_tokens": size.new_tokens,
        "rounds": len(rounds),
        "tokens_per_second": median([total_tokens_per_second(round_streams) for round_streams in rounds]),
        "first_token_ms": first_token_ms(streams),
        "accept_length": accept_length(streams),
        "failed": sum(stream.error is not None for stream in streams),
        "identical": all(a.token_ids == b.token_ids for r in rounds for a, b in zip(r, rounds[0], strict=True)),
        **{key: value for key, value in starts[-1].items() if key.startswith("memory")},
    }


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the goal for the median seconds from the start of the process to the first complete answer."""
    return [Goal("start to first answered request, s", result["first_answer_seconds"], GOAL_START_S)]


def show(result: dict[str, Any]) -> str:
    """Return the figures and goals as tables."""
    rows = [
        ("start to ready, s", result["ready_seconds"], ""),
        ("start to first answered request, s", result["first_answer_seconds"], f"under {GOAL_START_S:.0f}"),
        (f"tokens/s, {result['streams_at_once']} streams at once", result["tokens_per_second"], ""),
        ("first token, ms", result["first_token_ms"], ""),
        ("accept length", result["accept_length"], ""),
        ("failed streams", float(result["failed"]), "0"),
        *(
            (f"{memory['processes']} processes {when}, {kind}, MiB", memory[f"{key}_mib"], "")
            for when, memory in (("idle", result["memory_idle"]), ("after load", result["memory_loaded"]))
            for kind, key in (("resident", "resident"), ("resident, shared pages once", "proportional"))
        ),
    ]
    by_process = list(result["memory_by_process_mib"].items())
    title = (
        f"aerie serve: medians of {result['starts']} starts, {result['rounds']} rounds of {result['new_tokens']} tokens"
    )
    return "\n".join(
        [title, table(("", "measured", "goal"), rows), "", table(("process", "MiB, shared pages once"), by_process)]
    )


def _measure_start(pair: ModelPair, size: Size, rounds: list[list[ClientStream]]) -> dict[str, Any]:
    """Start the server once and add its streams to `rounds`. Return the seconds until it was ready and until its first
    complete answer (of one token), and its memory.

    Raises:
        ValueError: the first request failed.
    """
    target, draft = Path(pair.target).resolve(), Path(pair.draft).resolve()
    settings = [f"model={target}", f"speculative_draft_model_path={draft}"]
    settings += [f"dtype={pair.dtype}"] + ([f"num_threads={pair.num_threads}"] if pair.num_threads else [])
    started_at = time.monotonic()
    with ServerProcess(settings) as server:
        model = served_model(server.port)
        (first_stream,) = stream_all(server.port, model, [Prompt("import os\n")], 1)
        figures = {"ready": server.ready_s, "answered": time.monotonic() - started_at}
        if first_stream.error is not None:
            raise ValueError(f"the first request failed: {first_stream.error}")
        idle = memory_usage(server.processes())
        rounds += [stream_all(server.port, model, PROMPTS, size.new_tokens) for _ in range(size.rounds)]
        processes = server.processes()
        by_process: dict[str, float] = {}
        for process in processes:
            by_process[process.name] = by_process.get(process.name, 0.0) + memory_usage([process]).proportional_mib
        memory = {"memory_idle": asdict(idle), "memory_loaded": asdict(memory_usage(processes))}
        return figures | memory | {"memory_by_process_mib": by_process}
