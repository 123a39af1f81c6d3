"""One call with many requests: `merge_outputs` yields their outputs as they come, even if the call has more requests
than the engine's queue.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.actors.admission import Admission
from cluster.actors.messages import Overloaded
from cluster.actors.open_requests import OpenRequest
from cluster.api.core.errors import ApiError
from cluster.api.core.sequences import merge_outputs
from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.request import Request, RequestParams, SequenceOutput

ANSWER_TOKENS = 3  # tokens of each answer


class FakeEngine:
    """A fake engine that admits requests like a router. An admitted request gets a token every `pace_s` seconds."""

    def __init__(self, pace_s: float = 0.001, **settings: Any) -> None:
        self.admission = Admission(ResolvedSettings.from_settings(EngineConfig(model_path="m", **settings)))
        self.admission.on_gang_up(1 << 24)
        self.pace_s, self.open_requests, self.max_open_requests, self.refused_requests = pace_s, 0, 0, 0

    async def generate(self, request: Request) -> AsyncIterator[SequenceOutput]:
        try:
            self.admission.check(request)
        except Overloaded:
            self.refused_requests += 1
            raise
        open_request = OpenRequest(request)
        self.admission.on_admitted(open_request)
        self.open_requests += 1
        self.max_open_requests = max(self.max_open_requests, self.open_requests)
        try:
            for at in range(ANSWER_TOKENS):
                await asyncio.sleep(self.pace_s)
                finish_reason = "stop" if at == ANSWER_TOKENS - 1 else None
                output = open_request.record(SequenceOutput(request.request_id, (at,), finish_reason=finish_reason))
                self.admission.on_tokens(request.request_id, 1)
                yield output
        finally:
            self.open_requests -= 1
            self.admission.on_ended(request.request_id, stopped=False)


def requests(count: int, prompt: int, tokens: int = 256) -> list[Request]:
    return [Request(f"r{at}", tuple(range(prompt)), RequestParams(max_tokens=tokens)) for at in range(count)]


def collect_tokens(engine: FakeEngine, call_requests: list[Request]) -> dict[int, list[int]]:
    async def collect() -> dict[int, list[int]]:
        tokens_by_index: dict[int, list[int]] = {}
        async for at, output in merge_outputs(engine, call_requests):  # type: ignore[arg-type]
            tokens_by_index.setdefault(at, []).extend(output.token_ids)
        return tokens_by_index

    return asyncio.run(asyncio.wait_for(collect(), 30))


@pytest.mark.parametrize(
    ("count", "prompt", "settings"),
    [
        (1, 100_000, {}),
        (32, 2049, {}),
        (20, 3300, {}),
        (12, 40, {"max_queued_requests": 1}),
        (128, 20, {"max_running_requests": 8, "max_queue_wait_s": 5}),
    ],
)
def test_call_with_more_requests_than_the_queue_completes(count: int, prompt: int, settings: dict[str, Any]) -> None:
    engine = FakeEngine(**settings)
    tokens_by_index = collect_tokens(engine, requests(count, prompt))
    assert tokens_by_index == {at: [0, 1, 2] for at in range(count)}
    assert engine.open_requests == 0 and (count == 1 or engine.refused_requests), "no request found the queue full"


def test_call_is_refused_when_none_of_its_requests_is_admitted() -> None:
    async def run() -> None:
        engine = FakeEngine(pace_s=0.2, max_queued_requests=2)
        other_calls = [asyncio.create_task(_drain(engine, other_request)) for other_request in requests(2, 40)]
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError) as captured_error:
            async for _ in merge_outputs(engine, [Request(f"n{at}", (1,)) for at in range(5)]):  # type: ignore[arg-type]
                raise AssertionError("a request was admitted to a full queue")
        assert (
            captured_error.value.status == 503
            and captured_error.value.code == "overloaded"
            and engine.refused_requests == 5
        )
        await asyncio.gather(*other_calls)

    asyncio.run(run())


async def _drain(engine: FakeEngine, request: Request) -> None:
    async for _ in engine.generate(request):
        pass


def test_call_ends_refused_when_its_remaining_requests_find_a_full_queue() -> None:
    """The call is refused when its admitted requests have ended; it does not hang."""

    async def run() -> None:
        engine = FakeEngine(max_queued_requests=1)
        async for at, output in merge_outputs(engine, requests(3, 40)):  # type: ignore[arg-type]
            if at == 0 and output.finish_reason is None:
                engine.admission.on_admitted(OpenRequest(Request("another", (1,))))

    with pytest.raises(ApiError) as captured_error:
        asyncio.run(asyncio.wait_for(run(), 10))
    assert captured_error.value.code == "overloaded"


def test_closing_merge_outputs_aborts_running_and_waiting_requests() -> None:
    async def run() -> None:
        engine = FakeEngine(max_queued_requests=1)
        outputs = merge_outputs(engine, requests(6, 40))  # type: ignore[arg-type]
        assert (await anext(outputs))[0] == 0
        assert engine.open_requests and engine.refused_requests, "no request runs, or none waits"
        await outputs.aclose()
        assert engine.open_requests == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a waiting request was not aborted"

    asyncio.run(run())
