"""`aerie bench overload`: send five times as many requests as a server can serve; measure admissions and refusals.

It starts its own `aerie serve` on loopback with few slots, touches no other process, and ends by itself. First, a
closed loop with one client per slot measures the capacity: each client sends its next request when its last one has
ended. Then an open loop sends requests at a fixed rate.
"""

import asyncio
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from cluster.bench.goals import Goal
from cluster.bench.report import Say, machine, median, p99, ratio, table
from cluster.bench.server import TWO_RANKS, ServerProcess
from cluster.bench.streams import served_model
from cluster.bench.wire import Reply, drive, post

REFUSAL_S = 0.1  # goal for the p99 of the seconds to a refusal
GOODPUT = 0.9  # goal for the goodput, as a share of capacity
WITHIN_TWO = 0.9  # goal for the share of refusals whose Retry-After is within a factor of two of the real wait
NEAR_S = 2.0  # the real wait: median time to first token of admitted requests sent this close to the refused one


@dataclass(frozen=True, slots=True)
class Size:
    """The server has `slots` slots per rank and a bound on waiting; each request has `max_tokens` tokens. A closed loop
    of `capacity_s` seconds measures the capacity. Then an open loop sends `factor` x capacity for `seconds` seconds.
    """

    slots: int = 8
    max_tokens: int = 96
    max_wait_s: float = 10.0
    capacity_s: float = 30.0
    seconds: float = 60.0
    settle_s: float = 10.0  # time at the start, while the queue fills, that is not counted
    factor: float = 5.0


QUICK = Size(max_tokens=48, max_wait_s=4.0, capacity_s=8.0, seconds=20.0, settle_s=5.0)


def _body(model: str, number: int, max_tokens: int) -> dict[str, Any]:
    """Return the body of a request. Its prompt begins with `number`. All prompts have the same number of characters,
    all outputs the same number of tokens.
    """
    prompt = f"{number:07}: once upon a time there was a fox that"
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}


async def closed(port: int, model: str, clients: int, max_tokens: int, seconds: float) -> list[Reply]:
    """Run a closed loop of `clients` clients for `seconds`; return the replies, `began` from the loop's start on."""
    began = time.perf_counter()
    found: list[Reply] = []

    async def client(number: int) -> None:
        while time.perf_counter() - began < seconds:
            number += clients
            found.append(await post(port, "/v1/completions", _body(model, number, max_tokens)))

    await asyncio.gather(*(client(number) for number in range(clients)))
    return [replace(reply, began=reply.began - began) for reply in found]


async def opened(port: int, model: str, per_s: float, max_tokens: int, seconds: float) -> list[Reply]:
    """Run an open loop: send `per_s` requests a second for `seconds`. When all have ended, return the replies."""
    began = time.perf_counter()
    tasks: list[asyncio.Future[Reply]] = []
    while (now := time.perf_counter() - began) < seconds:
        while len(tasks) < now * per_s:
            body = _body(model, 1_000_000 + len(tasks), max_tokens)
            tasks.append(asyncio.ensure_future(post(port, "/v1/completions", body)))
        await asyncio.sleep(0.5 / per_s)
    return [replace(reply, began=reply.began - began) for reply in await asyncio.gather(*tasks)]


def measure(size: Size, say: Say) -> dict[str, Any]:
    """Measure the capacity, then overload the server; return the capacity and the figures of `judge`."""
    settings = [*TWO_RANKS, f"max_running_requests={size.slots}", f"max_queue_wait_s={size.max_wait_s}"]
    with ServerProcess(settings) as server, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        say(f"overload: ready after {server.ready_s:.1f} s")
        model = served_model(server.port)
        clients = 2 * size.slots
        other.submit(drive, closed, server.port, model, clients, size.max_tokens, 3.0).result()  # warm-up
        done = other.submit(drive, closed, server.port, model, clients, size.max_tokens, size.capacity_s).result()
        capacity = sum(one.complete for one in done) / max(one.began + one.seconds for one in done)
        say(f"overload: capacity {capacity:.2f} requests/s with {clients} clients")
        rate = size.factor * capacity
        found = other.submit(drive, opened, server.port, model, rate, size.max_tokens, size.seconds).result()
    return {"machine": machine(), "capacity": capacity, "offered": rate, **judge(found, size, capacity)}


def judge(found: list[Reply], size: Size, capacity: float) -> dict[str, Any]:
    """Return the figures of the requests under overload."""
    refused = [one for one in found if one.status == 503]
    taken = [one for one in found if one.status == 200 and one.complete]
    others = [one for one in found if one.status != 503 and not (one.status == 200 and one.complete)]
    ended = [one for one in taken if size.settle_s <= one.began + one.seconds <= size.seconds]
    goodput = len(ended) / (size.seconds - size.settle_s)
    ratios = []
    for one in refused:
        near = [two.first_s for two in taken if abs(two.began - one.began) < NEAR_S and two.first_s is not None]
        if one.began >= size.settle_s and one.retry_after_s is not None and near:
            ratios.append(one.retry_after_s / max(median(near), 0.001))
    return {
        "requests": len(found),
        "taken": len(taken),
        "refused": len(refused),
        "other": len(others),
        "other_said": [f"{one.status}: {one.failure or one.error}" for one in others][:3],
        "goodput": goodput,
        "goodput_of_capacity": ratio(goodput, capacity),
        "refusal_p50_s": median([one.seconds for one in refused]),
        "refusal_p99_s": p99([one.seconds for one in refused]),
        "retry_after_p50_s": median([one.retry_after_s or 0.0 for one in refused if one.began >= size.settle_s]),
        "retry_after_over_wait_p50": median(ratios),
        "retry_after_within_two": ratio(sum(0.5 <= r <= 2.0 for r in ratios), len(ratios)),
        "first_token_p50_s": median([one.first_s or 0.0 for one in taken]),
        "first_token_p99_s": p99([one.first_s or 0.0 for one in taken]),
        "max_wait_s": size.max_wait_s,
        "not_json": sum(not one.is_json for one in refused),
    }


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the goals of refused and admitted requests."""
    return [
        Goal("refusal p99, s", result["refusal_p99_s"], REFUSAL_S),
        Goal("share of Retry-After near the real wait", result["retry_after_within_two"], WITHIN_TWO, True),
        Goal("goodput of capacity", result["goodput_of_capacity"], GOODPUT, True),
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
        ("taken", "taken"),
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
