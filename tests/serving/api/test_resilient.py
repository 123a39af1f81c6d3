"""A stream through a separate ingress, over engines that die, disappear, have a full queue or serve another model."""

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

HEARTBEAT = StreamHeartbeat("target (float64)", 3, "m, m", 4096)
TOKENS = 24
# (request, index of the stream's next item) -> an item that replaces that item, or None
ItemOverride = Callable[[Request, int], StreamItem | None]


@dataclass
class FakeEngine:
    """An engine whose tokens count up from the client's last prompt token, two per step, also after a resume."""

    overrides: list[ItemOverride] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    open: int = 0

    async def generate(self, request: Request) -> AsyncIterator[SequenceOutput]:
        prompt = request.prompt_token_ids[: len(request.prompt_token_ids) - request.resumed_tokens]
        token_count, tree_count = request.resumed_tokens, 0
        self.open += 1
        try:
            while token_count < request.params.max_tokens:
                count = min(2, request.params.max_tokens - token_count)
                tokens = tuple(prompt[-1] + token_count + i + 1 for i in range(count))
                token_count += count
                ended = token_count == request.params.max_tokens
                counts = SpeculationCounts(tree_count, 3 * tree_count, (0, tree_count)) if ended else None
                finish, cached = "length" if ended else None, 1 + request.resumed_tokens
                yield SequenceOutput(request.request_id, tokens, (), finish, None, cached, counts)
                tree_count += 1
        finally:
            self.open -= 1


class FakeAttempt:
    """One attempt at a request on an engine replica. The override may replace items of the engine's stream."""

    def __init__(self, items: Any, override: ItemOverride, request: Request) -> None:
        self._items, self._override, self._request, self._number = items, override, request, 0
        self._closing: asyncio.Future[None] | None = None

    async def next(self, timeout_s: float) -> StreamItem:
        replacement = self._override(self._request, self._number)
        self._number += 1
        if replacement is not None:
            return replacement
        item: StreamItem = await anext(self._items)
        return item

    def close(self) -> None:
        self._closing = asyncio.ensure_future(self._items.aclose())


class FakeEngineCalls:
    """Opens attempts. Each takes the engine's next override; all attempts after the last override take the last one."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    def open(self, request: Request) -> FakeAttempt:
        engine = self.engine
        engine.requests.append(request)
        override = (
            engine.overrides[min(len(engine.requests), len(engine.overrides)) - 1] if engine.overrides else no_override
        )
        return FakeAttempt(stream_items(engine, request, HEARTBEAT, 1.0, lambda: ""), override, request)

    async def call(self, method: str) -> Any:
        raise EngineGoneError("no replica")


def no_override(request: Request, number: int) -> StreamItem | None:
    return None


def engine_dies_at(item_index: int) -> ItemOverride:
    def override(request: Request, number: int) -> StreamItem | None:
        if number == item_index:
            raise EngineGoneError("the actor died")
        return None

    return override


def item_instead_at(item_index: int, item: StreamItem) -> ItemOverride:
    return lambda request, number: item if number == item_index else None


@pytest.fixture(autouse=True)
def short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """With short pauses, a busy machine takes as many tries as an idle one before the client gives up."""
    monkeypatch.setattr("cluster.api.serve.resilient_client.RETRY_S", 0.02)


def run(*overrides: ItemOverride, **settings: Any) -> tuple[list[SequenceOutput], FakeEngine, list[None]]:
    """The outputs of one stream, its engine, and one None per counted resume."""
    engine, resumes = FakeEngine(list(overrides)), []
    config = EngineConfig(**{"model_path": "m", **settings})

    async def scenario() -> list[SequenceOutput]:
        client = ResilientClient(FakeEngineCalls(engine), config, 0, lambda: resumes.append(None), 0.5)
        request = Request("r", (7, 100), RequestParams(max_tokens=TOKENS))
        outputs = [output async for output in client.generate(request)]
        await asyncio.sleep(0.01)
        return outputs

    outputs = asyncio.run(scenario())
    assert engine.open == 0, "a dropped attempt still runs"
    return outputs, engine, resumes


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


ALL_TOKENS = list(range(101, 101 + TOKENS))


@pytest.mark.parametrize("item_index", [0, 1, 2, 5, 12])
def test_stream_resumes_at_the_token_where_its_engine_died(item_index: int) -> None:
    outputs, engine, resumes = run(engine_dies_at(item_index), no_override)
    assert tokens_of(outputs) == ALL_TOKENS
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
    assert {(output.request_id, output.cached_tokens) for output in outputs} == {("r", 1)}
    last_request = engine.requests[-1]
    received_count = max(0, item_index - 1) * 2
    assert last_request.resumed_tokens == received_count
    assert last_request.prompt_token_ids == (7, 100, *ALL_TOKENS[:received_count])
    assert last_request.params == engine.requests[0].params and last_request.params.seed is not None
    assert last_request.request_id != "r"  # the replica of the dead engine may still hold that id
    assert len(resumes) == (item_index > 0)


def test_stream_over_many_engine_deaths_keeps_tokens_and_speculation_counts() -> None:
    outputs, engine, resumes = run(*[engine_dies_at(item_index) for item_index in (4, 2, 3, 2, 2)], no_override)
    assert tokens_of(outputs) == ALL_TOKENS
    assert len(resumes) == 5
    first_outputs = len(engine.requests)  # an engine's first output comes from the prefill
    tree_count = len(outputs) - first_outputs
    assert outputs[-1].speculation == SpeculationCounts(tree_count, 3 * tree_count, (0, tree_count))


def test_stream_without_progress_ends_with_an_error_after_its_last_resume() -> None:
    outputs, engine, _ = run(engine_dies_at(3), engine_dies_at(1))
    assert tokens_of(outputs) == ALL_TOKENS[:4]
    assert outputs[-1].finish_reason == "error" and f"resumed {MAX_FRUITLESS_RESUMES} times" in (
        outputs[-1].error or ""
    )
    assert len(engine.requests) == 1 + MAX_FRUITLESS_RESUMES


def test_progress_resets_the_resume_count() -> None:
    outputs, _, _ = run(*[engine_dies_at(2)] * (2 * MAX_FRUITLESS_RESUMES), no_override)
    assert tokens_of(outputs) == ALL_TOKENS


def test_replica_with_too_little_capacity_is_skipped() -> None:
    small_replica = item_instead_at(0, replace(HEARTBEAT, max_request_tokens=TOKENS))
    outputs, engine, resumes = run(small_replica, small_replica, no_override)
    assert tokens_of(outputs) == ALL_TOKENS and len(engine.requests) == 3 and not resumes
    outputs, engine, resumes = run(engine_dies_at(2), small_replica, no_override)
    assert tokens_of(outputs) == ALL_TOKENS and len(resumes) == 1
    with pytest.raises(ValueError, match=f"max_tokens: {TOKENS + 2} tokens with the prompt, and .* room for {TOKENS} "):
        run(small_replica)


def test_shared_token_limit_is_the_smallest_recent_limit() -> None:
    clock = [0.0]
    shared_limit = SharedTokenLimit(lambda: clock[0])
    assert [shared_limit.update(token_limit) for token_limit in (100, 90, 100)] == [100, 90, 90]
    clock[0] = LIMIT_VALID_S
    assert shared_limit.update(100) == 100, "the smaller limit has expired"


def test_stream_is_aborted_when_no_engine_returns_in_time() -> None:
    outputs, _, _ = run(engine_dies_at(3), engine_dies_at(0))
    assert tokens_of(outputs) == ALL_TOKENS[:4]
    assert outputs[-1].finish_reason == "abort" and "within 0.5 s" in (outputs[-1].error or "")


def test_stream_resumes_on_another_engine_when_its_engine_shuts_down() -> None:
    outputs, _, resumes = run(item_instead_at(4, StreamAbandoned("shutting down")), no_override)
    assert tokens_of(outputs) == ALL_TOKENS and len(resumes) == 1


def test_full_queue_refuses_a_new_stream_but_not_a_resumed_stream() -> None:
    full_queue = item_instead_at(0, RequestRefused("the queue holds 9 tokens", 7.5))
    with pytest.raises(Overloaded, match="holds 9") as error_info:
        run(full_queue, no_override)
    assert error_info.value.retry_after_s == 7.5
    outputs, _, _ = run(engine_dies_at(3), full_queue, no_override)
    assert tokens_of(outputs) == ALL_TOKENS


def test_invalid_request_raises_and_a_refused_resume_ends_with_an_error() -> None:
    invalid_request = item_instead_at(1, RequestRefused("prompt: too long"))
    with pytest.raises(ValueError, match="too long"):
        run(invalid_request)
    outputs, _, _ = run(engine_dies_at(3), invalid_request)
    assert outputs[-1].finish_reason == "error" and "would not resume" in (outputs[-1].error or "")


def test_tokens_of_two_models_are_never_mixed() -> None:
    """No model continues the tokens of another model, and a replica of another model does not begin a stream."""
    another_model = item_instead_at(0, StreamHeartbeat("another", 0, "another, m", 4096))
    outputs, _, _ = run(engine_dies_at(3), another_model)
    assert tokens_of(outputs) == ALL_TOKENS[:4]
    assert outputs[-1].finish_reason == "abort" and "another is served now" in (outputs[-1].error or "")
    for overrides in ((another_model, another_model, no_override), (engine_dies_at(1), another_model, no_override)):
        outputs, engine, _ = run(*overrides)
        assert tokens_of(outputs) == ALL_TOKENS and len(engine.requests) == 3
    outputs, _, _ = run(another_model)
    assert not tokens_of(outputs) and outputs[-1].finish_reason == "abort"


def test_stream_without_tokens_may_move_to_another_dtype_of_the_model() -> None:
    outputs, _, _ = run(
        engine_dies_at(1), item_instead_at(0, StreamHeartbeat("target (float32)", 0, "m, m", 4096))
    )  # the client has no token yet
    assert outputs[-1].finish_reason == "length"


def test_closing_the_stream_closes_the_attempt() -> None:
    engine = FakeEngine()

    async def scenario() -> None:
        client = ResilientClient(FakeEngineCalls(engine), EngineConfig(model_path="m"), 0, lambda: None, 0.5)
        async with aclosing(client.generate(Request("r", (1,), RequestParams(max_tokens=9)))) as outputs:
            async for _ in outputs:
                assert engine.open == 1
                break
        await asyncio.sleep(0.01)
        assert engine.open == 0

    asyncio.run(scenario())


def test_status_is_unhealthy_and_metrics_are_empty_without_engines() -> None:
    async def scenario() -> None:
        client = ResilientClient(FakeEngineCalls(FakeEngine()), EngineConfig(model_path="m"), 0, lambda: None, 0.5)
        assert await client.status() == GangStatus(False, "no engine replica answers: no replica")
        assert await client.metrics() == []

    asyncio.run(scenario())


class ItemListEngine:
    """An engine that yields its items in order. It raises an item that is an exception, and waits for an item that is
    an event.
    """

    def __init__(self, *items: SequenceOutput | Exception | asyncio.Event) -> None:
        self.items = items
        self.closed = False

    async def generate(self, request: Request) -> AsyncIterator[SequenceOutput]:
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, asyncio.Event):
                    await item.wait()
                else:
                    yield item
        finally:
            self.closed = True


OUTPUT = SequenceOutput("r", (1, 2))
END = SequenceOutput("r", (3,), finish_reason="stop")
FAILED = SequenceOutput("r", (), finish_reason="error", error="the gang is lost")


@pytest.mark.parametrize(
    ("script", "leave_reason", "items"),
    [
        ((OUTPUT, END), "", [HEARTBEAT, OUTPUT, END]),
        ((Overloaded("full", 7.5),), "", [RequestRefused("full", 7.5)]),
        ((Unavailable("rank 1 died"),), "", [StreamAbandoned("rank 1 died")]),
        ((ValueError("prompt: bad"),), "", [HEARTBEAT, RequestRefused("prompt: bad")]),
        ((OUTPUT, asyncio.Event(), END), "", [HEARTBEAT, OUTPUT, HEARTBEAT, HEARTBEAT, END]),
        ((OUTPUT, FAILED), "", [HEARTBEAT, OUTPUT, FAILED]),
        ((OUTPUT, FAILED), "lost", [HEARTBEAT, OUTPUT, StreamAbandoned("lost")]),
        ((OUTPUT,), "", [HEARTBEAT, OUTPUT, StreamAbandoned("its stream ended without a reason")]),
    ],
    ids=["outputs", "overloaded", "unavailable", "bad request", "pause", "error", "error while leaving", "no end"],
)
def test_stream_items_yields_heartbeats_outputs_and_refusals(
    script: Any, leave_reason: str, items: list[StreamItem]
) -> None:
    engine = ItemListEngine(*script)
    reasons = iter([""])  # the replica begins to leave after it has accepted the request

    async def scenario() -> list[StreamItem]:
        received = []
        stream = stream_items(engine, Request("r", (1,)), HEARTBEAT, 0.05, lambda: next(reasons, leave_reason))
        async for item in stream:
            received.append(item)
            if received == items[:-1]:  # before the last item, the engine waits for an event, if it has one
                for event in (event for event in script if isinstance(event, asyncio.Event)):
                    event.set()
        return received

    assert asyncio.run(scenario()) == items
    assert engine.closed


def test_stream_items_abandons_a_request_when_the_engine_is_leaving() -> None:
    async def scenario() -> list[StreamItem]:
        return [
            item
            async for item in stream_items(
                ItemListEngine(OUTPUT), Request("r", (1,)), HEARTBEAT, 0.05, lambda: "leaving"
            )
        ]

    assert asyncio.run(scenario()) == [StreamAbandoned("leaving")], "no heartbeat, so that no resume is counted"


def test_closing_stream_items_closes_the_engine_stream() -> None:
    engine = ItemListEngine(OUTPUT, asyncio.Event(), END)

    async def scenario() -> None:
        items = stream_items(engine, Request("r", (1,)), HEARTBEAT, 0.05, lambda: "")
        assert [await anext(items) for _ in range(3)] == [HEARTBEAT, OUTPUT, HEARTBEAT]
        await items.aclose()
        assert engine.closed

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "script", [(OUTPUT, asyncio.Event(), END), (OUTPUT, OUTPUT, END)], ids=["engine waits", "more items"]
)
def test_stream_items_ends_when_its_reader_is_gone(script: Any) -> None:
    engine = ItemListEngine(*script)
    disconnected: list[bool] = []

    async def scenario() -> list[StreamItem]:
        items = []
        async for item in stream_items(
            engine, Request("r", (1,)), HEARTBEAT, 0.05, lambda: "", lambda: bool(disconnected)
        ):
            items.append(item)
            if item == OUTPUT:
                disconnected.append(True)
        return items

    assert asyncio.run(scenario()) == [HEARTBEAT, OUTPUT]
    assert engine.closed
