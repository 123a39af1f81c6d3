"""Reads the body of a request: limits of size and time, UTF-8, then JSON of limited depth and number of parts."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from fastapi import Request

from cluster.actors.messages import Overloaded
from cluster.api.core.errors import ApiError, ClientGoneError, overloaded, shown
from cluster.api.core.offload import off_loop
from cluster.api.core.service import RequestLimits
from cluster.api.proxy.middleware import too_slow

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
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout_at(began + limits.body_grace_s) as patience:
                while True:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    piece = message.get("body", b"")
                    body += piece
                    self._held += len(piece)
                    if len(body) > limits.body_bytes:
                        raise _too_large(limits.body_bytes)
                    if self._held > limits.held_bytes:
                        raise overloaded(Overloaded("the server is reading too many long bodies; try again", RETRY_S))
                    if not message.get("more_body", False):
                        return
                    patience.reschedule(began + limits.body_grace_s + len(body) / limits.body_bytes_per_s)
        except TimeoutError:
            raise ApiError(
                too_slow(len(body), loop.time() - began, limits.body_grace_s, limits.body_bytes_per_s),
                status=408,
                code="request_timeout",
                headers={"Connection": "close"},
            ) from None


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
