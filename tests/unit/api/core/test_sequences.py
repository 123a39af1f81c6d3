"""Many requests of one call: their outputs as they come, and more of them than the engine's queue holds."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.actors.admission import Admission
from cluster.actors.messages import Overloaded
from cluster.api.core.errors import ApiError
from cluster.api.core.sequences import merge_outputs
from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.request import Request, RequestParams, SequenceOutput

TEXT = 3  # tokens of each answer


class Engine:
    """Admits as a router does; a request that was admitted gets its tokens one by one, in `pace_s` each."""

    def __init__(self, pace_s: float = 0.001, **settings: Any) -> None:
        self.admission = Admission(ResolvedSettings.from_settings(EngineConfig(model_path="m", **settings)))
        self.admission.on_gang_up(1 << 24)
        self.pace_s, self.open, self.most, self.refused = pace_s, 0, 0, 0

    async def generate(self, request: Request) -> AsyncIterator[SequenceOutput]:
        try:
            self.admission.check(request)
        except Overloaded:
            self.refused += 1
            raise
        self.admission.on_admitted(request)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            for at in range(TEXT):
                await asyncio.sleep(self.pace_s)
                self.admission.on_tokens(request.request_id, 1)
                yield SequenceOutput(request.request_id, (at,), finish_reason="stop" if at == TEXT - 1 else None)
        finally:
            self.open -= 1
            self.admission.on_ended(request.request_id, stopped=False)


def requests(count: int, prompt: int, tokens: int = 256) -> list[Request]:
    return [Request(f"r{at}", tuple(range(prompt)), RequestParams(max_tokens=tokens)) for at in range(count)]


def all_of(engine: Engine, asked: list[Request]) -> dict[int, list[int]]:
    async def whole() -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        async for at, output in merge_outputs(engine, asked):  # type: ignore[arg-type]
            found.setdefault(at, []).extend(output.token_ids)
        return found

    return asyncio.run(asyncio.wait_for(whole(), 30))


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
    engine = Engine(**settings)
    found = all_of(engine, requests(count, prompt))
    assert found == {at: [0, 1, 2] for at in range(count)}
    assert engine.open == 0 and (count == 1 or engine.refused), "otherwise nothing had to wait"


def test_call_is_refused_when_none_of_its_requests_is_admitted() -> None:
    async def whole() -> None:
        engine = Engine(pace_s=0.2, max_queued_requests=2)
        others = [asyncio.create_task(_drain(engine, one)) for one in requests(2, 40)]
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError) as refused:
            async for _ in merge_outputs(engine, [Request(f"n{at}", (1,)) for at in range(5)]):  # type: ignore[arg-type]
                raise AssertionError("there is no room")
        assert refused.value.status == 503 and refused.value.code == "overloaded" and engine.refused == 5
        await asyncio.gather(*others)

    asyncio.run(whole())


async def _drain(engine: Engine, request: Request) -> None:
    async for _ in engine.generate(request):
        pass


def test_call_ends_refused_when_its_remaining_requests_find_a_full_queue() -> None:
    """When all that were taken are over; nothing hangs."""

    async def whole() -> None:
        engine = Engine(max_queued_requests=1)
        async for at, output in merge_outputs(engine, requests(3, 40)):  # type: ignore[arg-type]
            if at == 0 and output.finish_reason is None:
                engine.admission.on_admitted(Request("another", (1,)))

    with pytest.raises(ApiError) as refused:
        asyncio.run(asyncio.wait_for(whole(), 10))
    assert refused.value.code == "overloaded"


def test_closing_merge_outputs_aborts_running_and_waiting_requests() -> None:
    async def whole() -> Engine:
        engine = Engine(max_queued_requests=1)
        outputs = merge_outputs(engine, requests(6, 40))  # type: ignore[arg-type]
        assert (await anext(outputs))[0] == 0
        await outputs.aclose()
        return engine

    engine = asyncio.run(whole())
    assert engine.open == 0
