"""Shuts down an ingress replica without cutting streams: it refuses new calls and waits for the open ones."""

import asyncio
import importlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.core.errors import ApiError
from cluster.api.http.error_envelopes import envelope_of

logger = logging.getLogger(__name__)

GENERATION = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
REFUSED = GENERATION | {"/ready"}
RETRY_AFTER_S = 5  # about the time until another server, or the next one at this address, is ready
# Open streams are ended min(END_MARGIN_S, END_SHARE * graceful_shutdown_timeout_s) seconds before Serve kills the
# replica, so that their error events can still be sent.
END_MARGIN_S = 1.5
END_SHARE = 0.5
# While draining, `aerie serve` repeats its call of `Drain.begin`. If none comes for LAPSE_S, `aerie serve` was killed,
# and the replica accepts calls again.
LAPSE_S = 30.0
SHUTTING_DOWN = "the server is shutting down"


class Drain:
    """Whether one replica accepts calls, and how many are open. Used only on the event loop that serves the calls."""

    def __init__(self) -> None:
        self.open = 0
        self._until = 0.0

    @property
    def refusing(self) -> bool:
        """Whether new calls are refused now."""
        return time.monotonic() < self._until

    def begin(self) -> int:
        """Refuse new calls for the next `LAPSE_S` seconds, and return the number of open calls. `aerie serve` calls
        this repeatedly until the server ends.
        """
        if not self.refusing:
            logger.info("draining: %d open calls go on, new ones are refused", self.open)
        self._until = time.monotonic() + LAPSE_S
        return self.open

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Count a call as open inside the block."""
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


class DrainMiddleware:
    """ASGI middleware that counts generating calls; while the server drains, new ones and /ready get a 503."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, or refuse it while draining."""
        path = scope.get("path")
        if scope["type"] != "http" or path not in REFUSED:
            await self._app(scope, receive, send)
        elif self._drain.refusing:
            error = ApiError(
                f"{SHUTTING_DOWN}; send the request to another server, or again later",
                status=503,
                kind="server_error",
                code="shutting_down",
                headers={"Retry-After": str(RETRY_AFTER_S), "Connection": "close"},
            )
            await error.response(envelope_of(scope))(scope, receive, send)
        elif path in GENERATION:
            with self._drain.one_more():
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def when_leaving(end: Callable[[], None]) -> None:
    """Arrange that `end` is called on this event loop shortly before Serve kills this replica.

    On a redeploy or scale-down Serve gives a replica `graceful_shutdown_timeout_s` for its open requests and then kills
    it, without notice to the replica's code. So this function wraps a private method of Serve's replica. A version of
    Serve without that method is not patched; its open streams are cut at the end.
    """
    replica: Any = getattr(importlib.import_module("ray.serve._private.replica"), "Replica", None)
    stop = getattr(replica, "_perform_graceful_shutdown", None)
    if stop is None:
        logger.warning("Serve's replica has no _perform_graceful_shutdown; streams open when it ends will be cut")
        return
    loop = asyncio.get_running_loop()

    async def wrapped(self: Any) -> None:
        limit_s = float(self._deployment_config.graceful_shutdown_timeout_s)
        left_s = limit_s - min(END_MARGIN_S, END_SHARE * limit_s)
        loop.call_soon_threadsafe(lambda: loop.call_later(left_s, end))
        await stop(self)

    replica._perform_graceful_shutdown = wrapped
