"""Server-sent events (SSE), and work that is cancelled when its client leaves."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.core.errors import ApiError, ClientGoneError, internal

logger = logging.getLogger(__name__)

T = TypeVar("T")

LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Unicode line ends, as JSON escapes. They do not end a line in SSE, but clients that use `str.splitlines` split it."""
DONE = b"data: [DONE]\n\n"
ALIVE = b": alive\n\n"  # an SSE comment, which clients ignore
ALIVE_AFTER_S = 10.0
"""Seconds of silence before a stream sends a keep-alive. Clients give up after 20 to 300 s without a byte, load
balancers after 60 s. A long tool call, which is sent only when complete, and hidden reasoning can take longer.
"""


def json_bytes(data: Any) -> bytes:
    """Return `data` as compact JSON in UTF-8."""
    return _json(data).encode()


def _json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return one event as bytes; `name` is for the APIs that name their events."""
    text = _json(data)
    text = text if text.isascii() else text.translate(LINE_ENDS)
    return (f"event: {name}\n" if name else "").encode() + b"data: " + text.encode() + b"\n\n"


async def until_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client closes the connection first, `work` is cancelled.

    Call it only after the body has been read: then the next message from `receive` can only be the disconnect.

    Raises:
        ClientGoneError: the client left first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An SSE response. However the stream ends, `events` and their `source` are closed before the call returns.

    `failed` makes the events that report an error after the stream has begun; `alive` is the keep-alive.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: AsyncGenerator[Any, None],
        headers: Mapping[str, str],
        failed: Callable[[ApiError], bytes],
        alive: bytes = ALIVE,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._failed = failed
        self._alive = alive
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come. Stop when the client leaves, even while a send is blocked."""
        async with aclosing(self._source), aclosing(self._events):
            try:
                await until_client_leaves(receive, self._send(send))
            except (ClientGoneError, OSError):
                return

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sent_at = asyncio.get_running_loop().time()
        waking = asyncio.create_task(self._stay_alive(send))
        try:
            async for data in self._events:
                if data:
                    self._sent_at = asyncio.get_running_loop().time()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": self._failed(error), "more_body": True})
        except OSError:
            raise
        except Exception:
            logger.exception("a stream failed")
            failure = self._failed(internal("stream"))
            await send({"type": "http.response.body", "body": failure, "more_body": True})
        finally:
            waking.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stay_alive(self, send: Send) -> None:
        """Send a keep-alive whenever nothing has been sent for `ALIVE_AFTER_S`."""
        loop = asyncio.get_running_loop()
        while True:
            left = self._sent_at + ALIVE_AFTER_S - loop.time()
            if left <= 0:
                left, self._sent_at = ALIVE_AFTER_S, loop.time()
                try:
                    await send({"type": "http.response.body", "body": self._alive, "more_body": True})
                except OSError:
                    return  # the client has left; the next send of `_send` fails in the same way
            await asyncio.sleep(left)
