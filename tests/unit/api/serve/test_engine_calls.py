"""Calls of an ingress that Serve sheds because the engine deployment's queue is full: the engine is not lost."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from cluster.actors.messages import GangStatus, Overloaded
from cluster.api.serve.engine_calls import HandleCalls
from cluster.api.serve.resilient_client import EngineGoneError, ResilientClient
from cluster.config import EngineConfig
from cluster.request import Request, RequestParams


class FakeHandle:
    """A fake of Serve's handle. Each call raises the next of `errors`; a call whose error is None answers."""

    def __init__(self, *errors: Exception | None) -> None:
        self._errors = iter(errors)
        self.cancelled = 0

    def options(self, stream: bool) -> "FakeHandle":
        return self

    def __getattr__(self, method: str) -> "FakeHandle":
        return self

    def remote(self, *args: Any) -> Any:
        error = next(self._errors)
        if args:
            return self._stream(error)
        return self._answer_status(error)

    async def _answer_status(self, error: Exception | None) -> GangStatus:
        if error is not None:
            raise error
        return GangStatus(False, "rank 1 is suspect")

    async def _stream(self, error: Exception | None) -> AsyncIterator[Any]:
        assert error is not None
        raise error
        yield


def client(handle: FakeHandle) -> ResilientClient:
    return ResilientClient(HandleCalls(handle, "me"), EngineConfig(model_path="m"), 0, lambda: None, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("retry_after_s", "expected_s"), [(None, 1.0), (7.5, 7.5)])
def test_request_shed_by_serve_raises_overloaded(retry_after_s: float | None, expected_s: float) -> None:
    async def ask() -> None:
        request = Request("r", (7, 100), RequestParams(max_tokens=3))
        async for _ in client(FakeHandle(BackPressureError(9, 9, 503, retry_after_s))).generate(request):
            raise AssertionError("a shed request has no output")

    with pytest.raises(Overloaded, match=r"max_queued_requests: 9") as captured_error:
        asyncio.run(ask())
    assert captured_error.value.retry_after_s == expected_s


def test_status_stays_the_last_known_status_while_serve_sheds() -> None:
    queue_full_error = BackPressureError(9, 9)

    async def statuses(*errors: Exception | None) -> list[bool]:
        resilient_client = client(FakeHandle(*errors))
        return [(await resilient_client._fetch_status()).healthy for _ in errors]

    assert asyncio.run(statuses(queue_full_error, None, queue_full_error, RayActorError(), queue_full_error)) == [
        True,
        False,
        False,
        False,
        False,
    ]


def test_actor_error_becomes_engine_gone_error() -> None:
    with pytest.raises(EngineGoneError):
        asyncio.run(HandleCalls(FakeHandle(RayActorError()), "me").call("status"))  # type: ignore[arg-type]
