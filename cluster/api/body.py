"""A request's body: read within a limit, decoded as UTF-8, parsed as JSON that a program can rely on."""

import json
import math
import re
from typing import Any, NoReturn

from fastapi import Request

from cluster.api.errors import ApiError, ClientGoneError, shown

MAX_DEPTH = 64
# A string that never ends counts as one, so that no input is scanned twice.
_NOT_BRACKETS = re.compile(r'"(?:[^"\\]+|\\.)*+"?|[^\[\]{}"]+', re.DOTALL)


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The body as a JSON object of at most `limit` bytes.

    Raises:
        ApiError: 413 for a longer body, seen before it is held in memory; 415 for another content type; 400 for
            anything that is not a JSON object in UTF-8 with finite numbers and sane depth.
        ClientGoneError: the client left while sending.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(f"Content-Type must be application/json, got {shown(kind)}", status=415, code="invalid_body")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError("Content-Encoding is not supported: send the body uncompressed", status=415, code="invalid_body")
    return parse(await _read(request, limit))


async def _read(request: Request, limit: int) -> bytes:
    too_large = ApiError(
        f"the body is larger than {limit} bytes; shorten the prompt or send fewer prompts per request",
        status=413,
        code="request_too_large",
        headers={"Connection": "close"},
    )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise too_large
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


def parse(body: bytes) -> dict[str, Any]:
    """Bytes to a JSON object.

    Raises:
        ApiError: 400 that says what is wrong and where.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not valid UTF-8: byte {error.start} is 0x{body[error.start]:02x}") from None
    _check_depth(text)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise _bad(f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits
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


def _check_depth(text: str) -> None:
    depth = 0
    for bracket in _NOT_BRACKETS.sub("", text):
        if bracket in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _bad(f"the body is nested deeper than {MAX_DEPTH} levels")
        elif bracket in "]}":
            depth -= 1
