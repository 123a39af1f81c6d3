"""Calls of an ingress to the engine deployment that Serve sheds: a full queue, and no lost engine."""

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


class Handle:
    """A handle of Serve's, of whose calls each ends with the error of its turn; without one it answers."""

    def __init__(self, *errors: Exception | None) -> None:
        self._errors = iter(errors)
        self.cancelled = 0

    def options(self, stream: bool) -> "Handle":
        return self

    def __getattr__(self, method: str) -> "Handle":
        return self

    def remote(self, *args: Any) -> Any:
        error = next(self._errors)
        if args:
            return self._stream(error)
        return self._whole(error)

    async def _whole(self, error: Exception | None) -> GangStatus:
        if error is not None:
            raise error
        return GangStatus(False, "rank 1 is suspect")

    async def _stream(self, error: Exception | None) -> AsyncIterator[Any]:
        assert error is not None
        raise error
        yield


def client(handle: Handle) -> ResilientClient:
    return ResilientClient(HandleCalls(handle, "me"), EngineConfig(model_path="m"), 0, lambda: None, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "told"), [(None, 1.0), (7.5, 7.5)])
def test_request_shed_by_serve_raises_overloaded(given: float | None, told: float) -> None:
    async def ask() -> None:
        request = Request("r", (7, 100), RequestParams(max_tokens=3))
        async for _ in client(Handle(BackPressureError(9, 9, 503, given))).generate(request):
            raise AssertionError("nothing can have come")

    with pytest.raises(Overloaded, match=r"max_queued_requests: 9") as refused:
        asyncio.run(ask())
    assert refused.value.retry_after_s == told


def test_status_stays_the_last_known_status_while_serve_sheds() -> None:
    full = BackPressureError(9, 9)

    async def statuses(*errors: Exception | None) -> list[bool]:
        asked = client(Handle(*errors))
        return [(await asked._fetch_status()).healthy for _ in errors]

    assert asyncio.run(statuses(full, None, full, RayActorError(), full)) == [True, False, False, False, False]


def test_actor_error_becomes_engine_gone_error() -> None:
    with pytest.raises(EngineGoneError):
        asyncio.run(HandleCalls(Handle(RayActorError()), "me").call("status"))  # type: ignore[arg-type]
