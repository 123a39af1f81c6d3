"""A stream behind a separate ingress, over engines that die, vanish, fill up and change under it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cluster.actors.messages import GangStatus, Overloaded, Unavailable
from cluster.actors.streams import MAX_FRUITLESS_RESUMES
from cluster.api.serve.feed import stream_items
from cluster.api.serve.resilient_client import (
    LIMIT_VALID_S,
    EngineGoneError,
    RequestRefused,
    ResilientClient,
    SharedTokenLimit,
    StreamAbandoned,
    StreamHeartbeat,
    StreamItem,
)
from cluster.config import EngineConfig
from cluster.request import Request, RequestParams, SequenceOutput, SpeculationCounts

SIGN = StreamHeartbeat("target (float64)", 3, "m, m", 4096)
TOKENS = 24
Fate = Callable[[Request, int], StreamItem | None]  # (request, item number) -> what comes instead of the next output


@dataclass
class Engine:
    """Counts on from the last token that the client did not send itself, two per step; the seed is in the first."""

    fates: list[Fate] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    open: int = 0

    async def generate(self, request: Request) -> AsyncIterator[SequenceOutput]:
        prompt = request.prompt_token_ids[: len(request.prompt_token_ids) - request.resumed_tokens]
        done, trees = request.resumed_tokens, 0
        self.open += 1
        try:
            while done < request.params.max_tokens:
                count = min(2, request.params.max_tokens - done)
                tokens = tuple(prompt[-1] + done + i + 1 for i in range(count))
                done += count
                ended = done == request.params.max_tokens
                counts = SpeculationCounts(trees, 3 * trees, (0, trees)) if ended else None
                finish, cached = "length" if ended else None, 1 + request.resumed_tokens
                yield SequenceOutput(request.request_id, tokens, (), finish, None, cached, counts)
                trees += 1
        finally:
            self.open -= 1


class Attempt:
    def __init__(self, items: Any, fate: Fate, request: Request) -> None:
        self._items, self._fate, self._request, self._number = items, fate, request, 0
        self._closing: asyncio.Future[None] | None = None

    async def next(self, timeout_s: float) -> StreamItem:
        instead = self._fate(self._request, self._number)
        self._number += 1
        if instead is not None:
            return instead
        item: StreamItem = await anext(self._items)
        return item

    def close(self) -> None:
        self._closing = asyncio.ensure_future(self._items.aclose())


class Calls:
    """Every attempt has the next fate; the last one is everybody's after that."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def open(self, request: Request) -> Attempt:
        engine = self.engine
        engine.requests.append(request)
        fate = engine.fates[min(len(engine.requests), len(engine.fates)) - 1] if engine.fates else well
        return Attempt(stream_items(engine, request, SIGN, 1.0, lambda: ""), fate, request)

    async def call(self, method: str) -> Any:
        raise EngineGoneError("nobody")


def well(request: Request, number: int) -> StreamItem | None:
    return None


def dies_at(at: int) -> Fate:
    def fate(request: Request, number: int) -> StreamItem | None:
        if number == at:
            raise EngineGoneError("the actor died")
        return None

    return fate


def says(at: int, item: StreamItem) -> Fate:
    return lambda request, number: item if number == at else None


def run(*fates: Fate, **settings: Any) -> tuple[list[SequenceOutput], Engine, list[None]]:
    engine, resumed = Engine(list(fates)), []
    config = EngineConfig(**{"model_path": "m", **settings})

    async def whole() -> list[SequenceOutput]:
        client = ResilientClient(Calls(engine), config, 0, lambda: resumed.append(None), 0.5)
        request = Request("r", (7, 100), RequestParams(max_tokens=TOKENS))
        outputs = [output async for output in client.generate(request)]
        await asyncio.sleep(0.01)
        return outputs

    outputs = asyncio.run(whole())
    assert engine.open == 0, "a dropped attempt still runs"
    return outputs, engine, resumed


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


WHOLE = list(range(101, 101 + TOKENS))


@pytest.mark.parametrize("at", [0, 1, 2, 5, 12])
def test_stream_resumes_at_the_token_where_its_engine_died(at: int) -> None:
    outputs, engine, resumed = run(dies_at(at), well)
    assert tokens_of(outputs) == WHOLE
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
    assert {(output.request_id, output.cached_tokens) for output in outputs} == {("r", 1)}
    again = engine.requests[-1]
    got = max(0, at - 1) * 2
    assert again.resumed_tokens == got
    assert again.prompt_token_ids == (7, 100, *WHOLE[:got])
    assert again.params == engine.requests[0].params and again.params.seed is not None
    assert again.request_id != "r"  # the dead one's replica may hold that id still
    assert len(resumed) == (at > 0)


def test_stream_over_many_engine_deaths_keeps_tokens_and_speculation_counts() -> None:
    outputs, engine, resumed = run(*[dies_at(at) for at in (4, 2, 3, 2, 2)], well)
    assert tokens_of(outputs) == WHOLE
    assert len(resumed) == 5
    firsts = len(engine.requests)  # the first output of a life ends its prompt, the others are trees
    trees = len(outputs) - firsts
    assert outputs[-1].speculation == SpeculationCounts(trees, 3 * trees, (0, trees))


def test_stream_without_progress_ends_with_an_error_after_its_last_resume() -> None:
    outputs, engine, _ = run(dies_at(3), dies_at(1))
    assert tokens_of(outputs) == WHOLE[:4]
    assert outputs[-1].finish_reason == "error" and f"resumed {MAX_FRUITLESS_RESUMES} times" in (
        outputs[-1].error or ""
    )
    assert len(engine.requests) == 1 + MAX_FRUITLESS_RESUMES


def test_progress_resets_the_resume_count() -> None:
    outputs, _, _ = run(*[dies_at(2)] * (2 * MAX_FRUITLESS_RESUMES), well)
    assert tokens_of(outputs) == WHOLE


def test_replica_with_too_little_capacity_is_skipped() -> None:
    small = says(0, replace(SIGN, max_request_tokens=TOKENS))
    outputs, engine, resumed = run(small, small, well)
    assert tokens_of(outputs) == WHOLE and len(engine.requests) == 3 and not resumed
    outputs, engine, resumed = run(dies_at(2), small, well)
    assert tokens_of(outputs) == WHOLE and len(resumed) == 1
    with pytest.raises(ValueError, match=f"max_tokens: {TOKENS + 2} tokens with the prompt, and .* room for {TOKENS} "):
        run(small)


def test_shared_token_limit_is_the_smallest_recent_limit() -> None:
    now = [0.0]
    rooms = SharedTokenLimit(lambda: now[0])
    assert [rooms.update(room) for room in (100, 90, 100)] == [100, 90, 90]
    now[0] = LIMIT_VALID_S
    assert rooms.update(100) == 100, "the smaller one is heard of no more"


def test_stream_is_aborted_when_no_engine_returns_in_time() -> None:
    outputs, _, _ = run(dies_at(3), dies_at(0))
    assert tokens_of(outputs) == WHOLE[:4]
    assert outputs[-1].finish_reason == "abort" and "within 0.5 s" in (outputs[-1].error or "")


def test_stream_resumes_on_another_engine_when_its_engine_shuts_down() -> None:
    outputs, _, resumed = run(says(4, StreamAbandoned("shutting down")), well)
    assert tokens_of(outputs) == WHOLE and len(resumed) == 1


def test_full_queue_refuses_a_new_stream_but_not_a_resumed_stream() -> None:
    full = says(0, RequestRefused("the queue holds 9 tokens", 7.5))
    with pytest.raises(Overloaded, match="holds 9") as refused:
        run(full, well)
    assert refused.value.retry_after_s == 7.5
    outputs, _, _ = run(dies_at(3), full, well)
    assert tokens_of(outputs) == WHOLE


def test_invalid_request_raises_and_a_refused_resume_ends_with_an_error() -> None:
    bad = says(1, RequestRefused("prompt: too long"))
    with pytest.raises(ValueError, match="too long"):
        run(bad)
    outputs, _, _ = run(dies_at(3), bad)
    assert outputs[-1].finish_reason == "error" and "would not resume" in (outputs[-1].error or "")


def test_tokens_of_two_models_are_never_mixed() -> None:
    """Nor are tokens of one read by another: a replica of another model does not begin a stream."""
    another = says(0, StreamHeartbeat("another", 0, "another, m", 4096))
    outputs, _, _ = run(dies_at(3), another)
    assert tokens_of(outputs) == WHOLE[:4]
    assert outputs[-1].finish_reason == "abort" and "another is served now" in (outputs[-1].error or "")
    for fates in ((another, another, well), (dies_at(1), another, well)):
        outputs, engine, _ = run(*fates)
        assert tokens_of(outputs) == WHOLE and len(engine.requests) == 3
    outputs, _, _ = run(another)
    assert not tokens_of(outputs) and outputs[-1].finish_reason == "abort"


def test_stream_without_tokens_may_move_to_another_dtype_of_the_model() -> None:
    outputs, _, _ = run(
        dies_at(1), says(0, StreamHeartbeat("target (float32)", 0, "m, m", 4096))
    )  # nothing was sent yet
    assert outputs[-1].finish_reason == "length"


def test_closing_the_stream_closes_the_attempt() -> None:
    engine = Engine()

    async def whole() -> None:
        client = ResilientClient(Calls(engine), EngineConfig(model_path="m"), 0, lambda: None, 0.5)
        async with aclosing(client.generate(Request("r", (1,), RequestParams(max_tokens=9)))) as outputs:
            async for _ in outputs:
                assert engine.open == 1
                break
        await asyncio.sleep(0.01)
        assert engine.open == 0

    asyncio.run(whole())


def test_status_is_unhealthy_and_metrics_are_empty_without_engines() -> None:
    async def whole() -> None:
        client = ResilientClient(Calls(Engine()), EngineConfig(model_path="m"), 0, lambda: None, 0.5)
        assert await client.status() == GangStatus(False, "no engine replica answers: nobody")
        assert await client.metrics() == []

    asyncio.run(whole())


class Scripted:
    """An engine that does one thing."""

    def __init__(self, *items: SequenceOutput | Exception | float) -> None:
        self.items = items
        self.closed = False

    async def generate(self, request: Request) -> AsyncIterator[SequenceOutput]:
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, float):
                    await asyncio.sleep(item)
                else:
                    yield item
        finally:
            self.closed = True


OUTPUT = SequenceOutput("r", (1, 2))
END = SequenceOutput("r", (3,), finish_reason="stop")
FAILED = SequenceOutput("r", (), finish_reason="error", error="the gang is lost")


@pytest.mark.parametrize(
    ("script", "leaving", "items"),
    [
        ((OUTPUT, END), "", [SIGN, OUTPUT, END]),
        ((Overloaded("full", 7.5),), "", [RequestRefused("full", 7.5)]),
        ((Unavailable("rank 1 died"),), "", [StreamAbandoned("rank 1 died")]),
        ((ValueError("prompt: bad"),), "", [SIGN, RequestRefused("prompt: bad")]),
        ((OUTPUT, 0.12, END), "", [SIGN, OUTPUT, SIGN, SIGN, END]),
        ((OUTPUT, FAILED), "", [SIGN, OUTPUT, FAILED]),
        ((OUTPUT, FAILED), "lost", [SIGN, OUTPUT, StreamAbandoned("lost")]),
        ((OUTPUT,), "", [SIGN, OUTPUT, StreamAbandoned("its stream ended without a reason")]),
    ],
    ids=["outputs", "full", "lost", "at fault", "a pause", "an error", "an error of a replica that leaves", "cut"],
)
def test_stream_items_yields_heartbeats_outputs_and_refusals(
    script: Any, leaving: str, items: list[StreamItem]
) -> None:
    engine = Scripted(*script)
    asked = iter([""])  # it begins to leave only after it has taken the request

    async def whole() -> list[StreamItem]:
        return [
            item async for item in stream_items(engine, Request("r", (1,)), SIGN, 0.05, lambda: next(asked, leaving))
        ]

    assert asyncio.run(whole()) == items
    assert engine.closed


def test_stream_items_abandons_a_request_when_the_engine_is_leaving() -> None:
    async def whole() -> list[StreamItem]:
        return [
            item async for item in stream_items(Scripted(OUTPUT), Request("r", (1,)), SIGN, 0.05, lambda: "leaving")
        ]

    assert asyncio.run(whole()) == [StreamAbandoned("leaving")], "without a sign, so that no resume is counted"


def test_closing_stream_items_closes_the_engine_stream() -> None:
    engine = Scripted(OUTPUT, 30.0, END)

    async def whole() -> None:
        items = stream_items(engine, Request("r", (1,)), SIGN, 0.05, lambda: "")
        assert [await anext(items) for _ in range(3)] == [SIGN, OUTPUT, SIGN]
        await items.aclose()
        assert engine.closed

    asyncio.run(whole())


@pytest.mark.parametrize("script", [(OUTPUT, 30.0, END), (OUTPUT, OUTPUT, END)], ids=["it waits", "it has more"])
def test_stream_items_ends_when_its_reader_is_gone(script: Any) -> None:
    engine = Scripted(*script)
    gone: list[bool] = []

    async def whole() -> list[StreamItem]:
        items = []
        async for item in stream_items(engine, Request("r", (1,)), SIGN, 0.05, lambda: "", lambda: bool(gone)):
            items.append(item)
            if item == OUTPUT:
                gone.append(True)
        return items

    assert asyncio.run(whole()) == [SIGN, OUTPUT]
    assert engine.closed
