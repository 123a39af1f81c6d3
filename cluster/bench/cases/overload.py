"""`aerie bench overload`: send five times as many requests as a server can serve; measure admissions and refusals.

It starts its own `aerie serve` on loopback, which runs few requests at once (slots). It touches no other process, and
ends by itself. First, a closed loop with one client per slot measures the capacity: each client sends its next request
when its last one has ended. Then an open loop sends requests at a fixed rate, without waiting for answers.
"""

import asyncio
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from cluster.bench.goals import Goal
from cluster.bench.report import LogProgress, machine_info, median, p99, ratio, table
from cluster.bench.server import TWO_RANKS, ServerProcess
from cluster.bench.streams import served_model
from cluster.bench.wire import Reply, post, run_coroutine

GOAL_REFUSAL_S = 0.1  # goal for the p99 of the seconds to a refusal
GOAL_GOODPUT = 0.9  # goal for the goodput (complete answers per second), as a share of capacity
GOAL_WITHIN_TWO = 0.9  # goal for the share of refusals whose Retry-After is within a factor of two of the real wait
# The real wait of a refused request is estimated: it is the median time to first token of the admitted requests that
# were sent less than this many seconds before or after it.
NEARBY_S = 2.0


@dataclass(frozen=True, slots=True)
class Size:
    """The server runs `slots` requests per rank at once, and `max_wait_s` is its `max_queue_wait_s`. Each request
    generates `max_tokens` tokens. A closed loop of `capacity_s` seconds measures the capacity in requests per second.
    Then an open loop sends `load_factor` times as many requests per second, for `seconds` seconds.
    """

    slots: int = 8
    max_tokens: int = 96
    max_wait_s: float = 10.0
    capacity_s: float = 30.0
    seconds: float = 60.0
    warmup_s: float = 10.0  # start of the open loop, while the queue fills; not counted in goodput and Retry-After
    load_factor: float = 5.0


QUICK = Size(max_tokens=48, max_wait_s=4.0, capacity_s=8.0, seconds=20.0, warmup_s=5.0)


def _request_body(model: str, number: int, max_tokens: int) -> dict[str, Any]:
    """Return the body of a request. Its prompt begins with `number`. All prompts have the same number of characters,
    and all outputs have the same number of tokens.
    """
    prompt = f"{number:07}: once upon a time there was a fox that"
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}


async def closed_loop(port: int, model: str, clients: int, max_tokens: int, seconds: float) -> list[Reply]:
    """Run a closed loop of `clients` clients for `seconds`. Return the replies; `started_at` counts from the loop's
    start.
    """
    loop_started_at = time.perf_counter()
    replies: list[Reply] = []

    async def client(number: int) -> None:
        while time.perf_counter() - loop_started_at < seconds:
            number += clients
            replies.append(await post(port, "/v1/completions", _request_body(model, number, max_tokens)))

    await asyncio.gather(*(client(number) for number in range(clients)))
    return [replace(reply, started_at=reply.started_at - loop_started_at) for reply in replies]


async def open_loop(port: int, model: str, requests_per_s: float, max_tokens: int, seconds: float) -> list[Reply]:
    """Run an open loop: send `requests_per_s` requests a second for `seconds`. When all have ended, return the replies;
    `started_at` counts from the loop's start.
    """
    loop_started_at = time.perf_counter()
    tasks: list[asyncio.Future[Reply]] = []
    while (elapsed_s := time.perf_counter() - loop_started_at) < seconds:
        while len(tasks) < elapsed_s * requests_per_s:
            body = _request_body(model, 1_000_000 + len(tasks), max_tokens)
            tasks.append(asyncio.ensure_future(post(port, "/v1/completions", body)))
        await asyncio.sleep(0.5 / requests_per_s)
    return [replace(reply, started_at=reply.started_at - loop_started_at) for reply in await asyncio.gather(*tasks)]


def measure(size: Size, log_progress: LogProgress) -> dict[str, Any]:
    """Measure the capacity, then overload the server; return the capacity and the figures of `overload_figures`."""
    settings = [*TWO_RANKS, f"max_running_requests={size.slots}", f"max_queue_wait_s={size.max_wait_s}"]
    with (
        ServerProcess(settings) as server,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as load_process,
    ):
        log_progress(f"overload: ready after {server.ready_s:.1f} s")
        model = served_model(server.port)
        clients = 2 * size.slots
        load_process.submit(
            run_coroutine, closed_loop, server.port, model, clients, size.max_tokens, 3.0
        ).result()  # warm-up
        capacity_replies = load_process.submit(
            run_coroutine, closed_loop, server.port, model, clients, size.max_tokens, size.capacity_s
        ).result()
        capacity = sum(reply.complete for reply in capacity_replies) / max(
            reply.started_at + reply.seconds for reply in capacity_replies
        )
        log_progress(f"overload: capacity {capacity:.2f} requests/s with {clients} clients")
        offered_per_s = size.load_factor * capacity
        overload_replies = load_process.submit(
            run_coroutine, open_loop, server.port, model, offered_per_s, size.max_tokens, size.seconds
        ).result()
    return {
        "machine": machine_info(),
        "capacity": capacity,
        "offered": offered_per_s,
        **overload_figures(overload_replies, size, capacity),
    }


def overload_figures(replies: list[Reply], size: Size, capacity: float) -> dict[str, Any]:
    """Return the figures of the requests under overload. Goodput counts the complete answers that ended after
    `size.warmup_s` and before `size.seconds`. `other` counts the requests that were neither refused nor completed.
    """
    refused = [reply for reply in replies if reply.status == 503]
    admitted = [reply for reply in replies if reply.status == 200 and reply.complete]
    unserved = [reply for reply in replies if reply.status != 503 and not (reply.status == 200 and reply.complete)]
    counted = [reply for reply in admitted if size.warmup_s <= reply.started_at + reply.seconds <= size.seconds]
    goodput = len(counted) / (size.seconds - size.warmup_s)
    ratios = []
    for reply in refused:
        nearby_waits = [
            nearby.first_event_s
            for nearby in admitted
            if abs(nearby.started_at - reply.started_at) < NEARBY_S and nearby.first_event_s is not None
        ]
        if reply.started_at >= size.warmup_s and reply.retry_after_s is not None and nearby_waits:
            ratios.append(reply.retry_after_s / max(median(nearby_waits), 0.001))
    return {
        "requests": len(replies),
        "taken": len(admitted),
        "refused": len(refused),
        "other": len(unserved),
        "other_said": [f"{reply.status}: {reply.error_event or reply.error}" for reply in unserved][:3],
        "goodput": goodput,
        "goodput_of_capacity": ratio(goodput, capacity),
        "refusal_p50_s": median([reply.seconds for reply in refused]),
        "refusal_p99_s": p99([reply.seconds for reply in refused]),
        "retry_after_p50_s": median(
            [reply.retry_after_s or 0.0 for reply in refused if reply.started_at >= size.warmup_s]
        ),
        "retry_after_over_wait_p50": median(ratios),
        "retry_after_within_two": ratio(sum(0.5 <= r <= 2.0 for r in ratios), len(ratios)),
        "first_token_p50_s": median([reply.first_event_s or 0.0 for reply in admitted]),
        "first_token_p99_s": p99([reply.first_event_s or 0.0 for reply in admitted]),
        "max_wait_s": size.max_wait_s,
        "not_json": sum(not reply.is_json for reply in refused),
    }


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the goals for refused requests, admitted requests, and requests that are neither."""
    return [
        Goal("refusal p99, s", result["refusal_p99_s"], GOAL_REFUSAL_S),
        Goal("share of Retry-After near the real wait", result["retry_after_within_two"], GOAL_WITHIN_TWO, True),
        Goal("goodput of capacity", result["goodput_of_capacity"], GOAL_GOODPUT, True),
        Goal("first token p99, s", result["first_token_p99_s"], result["max_wait_s"]),
        Goal("refusals that are not JSON", result["not_json"], 0, slack=1),
        Goal("requests neither served nor refused", result["other"], 0, slack=1),
    ]


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    names = (
        ("capacity, requests/s", "capacity"),
        ("offered, requests/s", "offered"),
        ("goodput, requests/s", "goodput"),
        ("goodput of capacity", "goodput_of_capacity"),
        ("admitted", "taken"),
        ("refused", "refused"),
        ("neither", "other"),
        ("refusal p50 s", "refusal_p50_s"),
        ("refusal p99 s", "refusal_p99_s"),
        ("Retry-After p50 s", "retry_after_p50_s"),
        ("Retry-After over the real wait, p50", "retry_after_over_wait_p50"),
        ("share within a factor of two", "retry_after_within_two"),
        ("first token p50 s", "first_token_p50_s"),
        ("first token p99 s", "first_token_p99_s"),
        ("bound on the wait s", "max_wait_s"),
    )
    return table(["figure", "value"], [[label, result[name]] for label, name in names])
