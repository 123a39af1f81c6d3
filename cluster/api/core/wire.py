"""Reads the JSON bodies of requests, and sends server-sent events (SSE) until the client leaves."""

import asyncio
import json
import logging
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.actors.messages import Overloaded
from cluster.api.core.errors import ApiError, ClientGoneError, internal, overloaded, shown
from cluster.api.core.limits import RequestLimits, off_loop
from cluster.api.proxy.body_time_limit import SlowBodyError, read_pieces

MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 16  # lists and objects of one body, together
MAX_KEYS = 1024  # fields of one object; the largest that clients send is logit_bias, 300 to 1,024 ids at OpenAI
KEYS_EACH, KEYS_MORE = 4, 4096  # a body may have KEYS_EACH * (lists and objects in it) + KEYS_MORE fields
# Matches either text between structural characters (strings, numbers, words), or a run of structural characters
# (group 1). A match is short, so that a long body does not hold the GIL for long. A string without an end matches too,
# so no character is scanned twice.
_RUNS = re.compile(r'(?:"(?:[^"\\]+|\\.)*+"?|[^\[\]{}:"]+){1,4096}+|([\[\]{}:]{1,4096})', re.DOTALL)
RETRY_S = 1.0  # Retry-After if the bodies in memory exceed RequestLimits.held_bytes


class BodyReader:
    """Reads the request bodies of a replica, and counts the bytes of all bodies in memory."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._held = 0

    @asynccontextmanager
    async def json(self, request: Request) -> AsyncIterator[tuple[dict[str, Any], int]]:
        """Yield the body as a JSON object, and its length in bytes. The body counts as in memory until the `with` ends.

        Raises:
            ApiError: 413 for a body longer than `RequestLimits.body_bytes`, as soon as its Content-Length or its bytes
                exceed the limit; 408 for a body that arrives too slowly; 503 if the bodies in memory together exceed
                `RequestLimits.held_bytes`; 415 for another content type or a compressed body; 400 for a body that is
                not a JSON object in UTF-8 with finite numbers, or is too deep or has too many parts.
            ClientGoneError: the client closed the connection while sending.
        """
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(f"Content-Type must be application/json, got {shown(kind)}", status=415, code="invalid_body")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            message = "Content-Encoding is not supported: send the body uncompressed"
            raise ApiError(message, status=415, code="invalid_body")
        body = bytearray()
        try:
            await self._read(request, body)
            length = len(body)
            yield await off_loop(length, lambda: parse(bytes(body))), length
        finally:
            self._held -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        limits = self._limits
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > limits.body_bytes):
            raise _too_large(limits.body_bytes)

        def take(piece: bytes) -> bool:
            body.extend(piece)
            self._held += len(piece)
            if len(body) > limits.body_bytes:
                raise _too_large(limits.body_bytes)
            if self._held > limits.held_bytes:
                raise overloaded(Overloaded("the server is reading too many long bodies; try again", RETRY_S))
            return True

        try:
            more = await read_pieces(request.receive, take, limits.body_grace_s, limits.body_bytes_per_s)
        except SlowBodyError as slow:
            headers = {"Connection": "close"}
            raise ApiError(str(slow), status=408, code="request_timeout", headers=headers) from None
        if more is None:
            raise ClientGoneError


def _too_large(limit: int) -> ApiError:
    return ApiError(
        f"the body is larger than {limit} bytes; shorten the prompt or send fewer prompts per request",
        status=413,
        code="request_too_large",
        headers={"Connection": "close"},
    )


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`.

    Raises:
        ApiError: 400 that says what is wrong and where.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not valid UTF-8: byte {error.start} is 0x{body[error.start]:02x}") from None
    _check_parts(text)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_small_object)
    except json.JSONDecodeError as error:
        raise _bad(f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except (ValueError, RecursionError):  # Python refuses an integer of more than 4,300 digits
        raise _bad("the body is not valid JSON: a number is too long") from None
    if not isinstance(value, dict):
        raise _bad(f"the body must be a JSON object, got {shown(value)}")
    return value


def _bad(message: str) -> ApiError:
    return ApiError(message, code="invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    raise _bad(f"the body is not valid JSON: {name} is not a number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _bad(f"the body holds the number {shown(digits)}, which is too large")
    return number


def _small_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise _bad(
            f"the body holds an object of {len(pairs)} fields; an object may have at most {MAX_KEYS}, logit_bias too "
            "(OpenAI takes 300 to 1,024 ids of it, by model)"
        )
    return dict(pairs)


def _check_parts(text: str) -> None:
    """Raise 400 for a body that is nested too deeply or has too many parts, before it is parsed."""
    if text.count("[") + text.count("{") <= MAX_DEPTH and text.count(":") <= KEYS_MORE:
        return  # counts include brackets in strings, so they are upper bounds; most bodies end here
    depth = containers = keys = 0
    for run in _RUNS.finditer(text):
        for sign in run[1] or "":
            if sign == ":":
                keys += 1
            elif sign in "[{":
                depth += 1
                containers += 1
            else:
                depth -= 1
            if depth > MAX_DEPTH:
                raise _bad(f"the body is nested deeper than {MAX_DEPTH} levels")
            if containers > MAX_CONTAINERS:
                raise _bad(f"the body holds more than {MAX_CONTAINERS} lists and objects")
            if keys > KEYS_MORE + KEYS_EACH * containers:
                raise _bad(f"the body holds too many fields; an object may have at most {MAX_KEYS}")


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
