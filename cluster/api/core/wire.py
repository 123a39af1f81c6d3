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
from cluster.api.core.errors import ApiError, ClientDisconnectedError, internal_error, overloaded_error, truncated_repr
from cluster.api.core.limits import RequestLimits, run_off_loop
from cluster.api.proxy.body_time_limit import SlowBodyError, read_chunks

MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 16  # lists and objects of one body, together
MAX_KEYS = 1024  # fields of one object; the largest that clients send is logit_bias, 300 to 1,024 ids at OpenAI
KEYS_PER_CONTAINER, EXTRA_KEYS = 4, 4096  # fields of a body: 4 for each list or object in it, and 4096 more
# Matches either text between structural characters (strings, numbers, words), or a run of structural characters
# (group 1). A match has at most 4,096 strings, pieces of other text or structural characters, so that a long body does
# not hold the GIL for long. A string without an end matches too, so no character is scanned twice.
_STRUCTURE_RUNS = re.compile(r'(?:"(?:[^"\\]+|\\.)*+"?|[^\[\]{}:"]+){1,4096}+|([\[\]{}:]{1,4096})', re.DOTALL)
MEMORY_RETRY_S = 1.0  # Retry-After, in seconds, if the bodies in memory exceed RequestLimits.held_bytes


class BodyReader:
    """Reads the request bodies of a replica, and counts the bytes of all bodies in memory."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._bytes_in_memory = 0

    @asynccontextmanager
    async def read_json(self, request: Request) -> AsyncIterator[tuple[dict[str, Any], int]]:
        """Yield the body as a JSON object, and its length in bytes. The body counts as in memory until the `with` ends.

        Raises:
            ApiError: 413 for a body longer than `RequestLimits.body_bytes`, as soon as its Content-Length or its bytes
                exceed the limit; 408 for a body that arrives too slowly; 503 if the bodies in memory together exceed
                `RequestLimits.held_bytes`; 415 for another content type or a compressed body; 400 for a body that is
                not a JSON object in UTF-8 with finite numbers, or is too deep or has too many parts.
            ClientDisconnectedError: the client closed the connection while sending.
        """
        content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if content_type != "application/json" and not content_type.endswith("+json"):
            raise ApiError(
                f"Content-Type must be application/json, got {truncated_repr(content_type)}",
                status=415,
                code="invalid_body",
            )
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            message = "Content-Encoding is not supported: send the body uncompressed"
            raise ApiError(message, status=415, code="invalid_body")
        body = bytearray()
        try:
            await self._read(request, body)
            length = len(body)
            yield await run_off_loop(length, lambda: parse_body(bytes(body))), length
        finally:
            self._bytes_in_memory -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        limits = self._limits
        content_length = request.headers.get("content-length", "")
        if content_length.isdecimal() and (len(content_length) > 18 or int(content_length) > limits.body_bytes):
            raise _too_large_error(limits.body_bytes)

        def consume(chunk: bytes) -> bool:
            body.extend(chunk)
            self._bytes_in_memory += len(chunk)
            if len(body) > limits.body_bytes:
                raise _too_large_error(limits.body_bytes)
            if self._bytes_in_memory > limits.held_bytes:
                raise overloaded_error(
                    Overloaded("the server is reading too many long bodies; try again", MEMORY_RETRY_S)
                )
            return True

        try:
            more_to_come = await read_chunks(request.receive, consume, limits.body_grace_s, limits.body_bytes_per_s)
        except SlowBodyError as slow:
            headers = {"Connection": "close"}
            raise ApiError(str(slow), status=408, code="request_timeout", headers=headers) from None
        if more_to_come is None:
            raise ClientDisconnectedError


def _too_large_error(limit: int) -> ApiError:
    return ApiError(
        f"the body is larger than {limit} bytes; shorten the prompt or send fewer prompts per request",
        status=413,
        code="request_too_large",
        headers={"Connection": "close"},
    )


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`.

    Raises:
        ApiError: 400 that says what is wrong and where.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid_json(f"the body is not valid UTF-8: byte {error.start} is 0x{body[error.start]:02x}") from None
    _check_structure(text)
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_parse_finite, object_pairs_hook=_build_object
        )
    except json.JSONDecodeError as error:
        raise _invalid_json(
            f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except (ValueError, RecursionError):  # Python refuses an integer of more than 4,300 digits
        raise _invalid_json("the body is not valid JSON: a number is too long") from None
    if not isinstance(value, dict):
        raise _invalid_json(f"the body must be a JSON object, got {truncated_repr(value)}")
    return value


def _invalid_json(message: str) -> ApiError:
    return ApiError(message, code="invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid_json(f"the body is not valid JSON: {name} is not a number")


def _parse_finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _invalid_json(f"the body holds the number {truncated_repr(digits)}, which is too large")
    return number


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise _invalid_json(
            f"the body holds an object of {len(pairs)} fields; an object may have at most {MAX_KEYS}, logit_bias too "
            "(OpenAI takes 300 to 1,024 ids of it, by model)"
        )
    return dict(pairs)


def _check_structure(text: str) -> None:
    """Raise 400 for a body that is nested too deeply or has too many parts, before it is parsed."""
    if text.count("[") + text.count("{") <= MAX_DEPTH and text.count(":") <= EXTRA_KEYS:
        return  # counts include brackets in strings, so they are upper bounds; most bodies end here
    depth = containers = keys = 0
    for run in _STRUCTURE_RUNS.finditer(text):
        for character in run[1] or "":
            if character == ":":
                keys += 1
            elif character in "[{":
                depth += 1
                containers += 1
            else:
                depth -= 1
            if depth > MAX_DEPTH:
                raise _invalid_json(f"the body is nested deeper than {MAX_DEPTH} levels")
            if containers > MAX_CONTAINERS:
                raise _invalid_json(f"the body holds more than {MAX_CONTAINERS} lists and objects")
            if keys > EXTRA_KEYS + KEYS_PER_CONTAINER * containers:
                raise _invalid_json(f"the body holds too many fields; an object may have at most {MAX_KEYS}")


logger = logging.getLogger(__name__)

T = TypeVar("T")

LINE_END_ESCAPES = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Maps Unicode line ends to their JSON escapes. These characters do not end a line in SSE, but clients that use
`str.splitlines` would split the line there.
"""
DONE_EVENT = b"data: [DONE]\n\n"
KEEP_ALIVE = b": alive\n\n"  # an SSE comment, which clients ignore
KEEP_ALIVE_INTERVAL_S = 10.0
"""Seconds of silence before a stream sends a keep-alive. Clients give up after 20 to 300 s without a byte, load
balancers after 60 s. A long tool call, which is sent only when complete, and hidden reasoning can take longer.
"""


def json_bytes(data: Any) -> bytes:
    """Return `data` as compact JSON in UTF-8."""
    return _json_text(data).encode()


def _json_text(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def sse_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return one event as bytes. `name` is the event's name, or empty if the API does not name its events."""
    text = _json_text(data)
    text = text if text.isascii() else text.translate(LINE_END_ESCAPES)
    return (f"event: {name}\n" if name else "").encode() + b"data: " + text.encode() + b"\n\n"


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client closes the connection first, `work` is cancelled.

    Call it only after the body has been read: then the next message from `receive` can only be the disconnect.

    Raises:
        ClientDisconnectedError: the client left first.
    """
    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return work_task.result()
        raise ClientDisconnectedError
    finally:
        work_task.cancel()
        disconnect_task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An SSE response. However the stream ends, `events` and `source` are closed before `__call__` returns. `source` is
    the generator from which `events` reads.

    `error_events` makes the bytes that report an error after the stream has begun. `keep_alive` is sent while there are
    no events.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: AsyncGenerator[Any, None],
        headers: Mapping[str, str],
        error_events: Callable[[ApiError], bytes],
        keep_alive: bytes = KEEP_ALIVE,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._error_events = error_events
        self._keep_alive = keep_alive
        self._last_sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come. Stop when the client leaves, even while a send is blocked."""
        async with aclosing(self._source), aclosing(self._events):
            try:
                await run_until_disconnect(receive, self._send(send))
            except (ClientDisconnectedError, OSError):
                return

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._last_sent_at = asyncio.get_running_loop().time()
        keep_alive_task = asyncio.create_task(self._send_keep_alives(send))
        try:
            async for chunk in self._events:
                if chunk:
                    self._last_sent_at = asyncio.get_running_loop().time()
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": self._error_events(error), "more_body": True})
        except OSError:
            raise
        except Exception:
            logger.exception("a stream failed")
            error_chunk = self._error_events(internal_error("stream"))
            await send({"type": "http.response.body", "body": error_chunk, "more_body": True})
        finally:
            keep_alive_task.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_keep_alives(self, send: Send) -> None:
        """Send a keep-alive whenever nothing has been sent for `KEEP_ALIVE_INTERVAL_S`."""
        loop = asyncio.get_running_loop()
        while True:
            wait_s = self._last_sent_at + KEEP_ALIVE_INTERVAL_S - loop.time()
            if wait_s <= 0:
                wait_s, self._last_sent_at = KEEP_ALIVE_INTERVAL_S, loop.time()
                try:
                    await send({"type": "http.response.body", "body": self._keep_alive, "more_body": True})
                except OSError:
                    return  # the client has left; the next send of `_send` fails in the same way
            await asyncio.sleep(wait_s)
