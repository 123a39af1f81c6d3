"""Errors of all APIs: message, field, status, and OpenAI's envelope. No message shows a traceback."""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from cluster.actors.messages import Overloaded
from cluster.api.proxy.refusals import FULL_HEADER, hold_s

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1  # the smallest Retry-After of a request refused as overloaded
DEFAULT_RESTART_S = 5.0  # Retry-After while the time that an engine needs to start is unknown
NOT_FOUND = 404
CLIENT_CLOSED_REQUEST = 499  # as in nginx: this status is only in logs and metrics, since the client has left
MAX_PATH = 200  # characters of a field's path; limited because clients choose the names in it
MAX_METHOD = 16
MISSING_APIS: Mapping[str, str] = {
    "embeddings": "embeddings: its models continue text",
    "audio": "speech and transcription: its models read and write text",
    "images": "images: its models read and write text",
    "videos": "videos: its models read and write text",
    "realtime": "realtime sessions",
    "moderations": "moderation",
    "files": "files",
    "uploads": "files",
    "vector_stores": "files",
    "batches": "batches: send requests one by one, as many at once as you like",
    "fine_tuning": "fine-tuning",
    "assistants": "assistants: send whole conversations",
    "threads": "assistants: send whole conversations",
    "evals": "evaluations",
    "rerank": "reranking",
    "score": "scoring by pairs: prompt_logprobs score a text",
}
"""The APIs of OpenAI and vLLM that this server does not have. Each key is the first part of the API's path after /v1;
the value describes the API in the message of a 404.
"""
MAX_QUOTED_CHARACTERS = 60  # the most characters of a refused value in a message


class ApiError(Exception):
    """An error that is sent to the client. `param` is the path of the wrong field, such as `messages.0.role`, or None;
    `code` and `kind` are the fields `code` and `type` of OpenAI's error object.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind
        self.headers = dict(headers or {})

    def envelope(self) -> dict[str, Any]:
        """Return OpenAI's error object. It is the body of the answer, or the data of an event if a stream has begun."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, envelope: "Envelope | None" = None) -> Response:
        """Return this error as an HTTP response. `envelope` makes the body; with None the body is OpenAI's. After a
        stream has begun, an error cannot be a response: it must be sent as an event.
        """
        # ASCII with escapes: a message may quote a lone surrogate from the client, which UTF-8 cannot encode.
        body = json.dumps(self.envelope() if envelope is None else envelope(self)).encode()
        return Response(body, self.status, media_type="application/json", headers=self.headers)


Envelope = Callable[[ApiError], Mapping[str, Any]]
"""A function that makes the body of an error in the form of one API."""


def invalid_value(param: str, reason: str, code: str = "invalid_value") -> ApiError:
    """Return a 400 for the field with the path `param`. The message begins with this path."""
    return ApiError(f"{param}: {reason}", param=param, code=code)


def invalid_type(param: str, expected: str, value: Any) -> ApiError:
    """Return a 400 for a field whose value has another type than `expected`."""
    return invalid_value(param, f"must be {expected}, got {truncated_repr(value)}", "invalid_type")


def missing_parameter(param: str) -> ApiError:
    """Return a 400 for a field that must be sent."""
    return invalid_value(param, "required", "missing_required_parameter")


def unsupported_parameter(param: str, reason: str) -> ApiError:
    """Return a 400 for a field that this server, or this model, does not honour."""
    return invalid_value(param, reason, "unsupported_parameter")


class ClientDisconnectedError(Exception):
    """The client closed the connection before its answer was complete."""


def overloaded_error(error: Overloaded, for_every_client: bool = False) -> ApiError:
    """Return a 503 for a full queue; Retry-After says when a request is likely to be admitted. If `for_every_client` is
    true, a request of any client would be refused now, and a header lets the proxy repeat this answer for a while.
    """
    proxy_headers = {FULL_HEADER.decode(): f"{hold_s(error.retry_after_s):.3f}"} if for_every_client else {}
    return ApiError(
        str(error) or "the server is full; try again shortly",
        status=503,
        kind="overloaded_error",
        code="overloaded",
        headers={"Retry-After": str(max(RETRY_AFTER_S, math.ceil(error.retry_after_s))), **proxy_headers},
    )


def unavailable_error(reason: str, retry_after_s: float = DEFAULT_RESTART_S) -> ApiError:
    """Return a 503 with Retry-After for an engine that makes no progress, is lost, or shuts down."""
    return ApiError(
        reason,
        status=503,
        kind="server_error",
        code="engine_unhealthy",
        headers={"Retry-After": str(max(1, math.ceil(retry_after_s)))},
    )


def internal_error(source: str) -> ApiError:
    """Return a 500 for a failure of the server; the log has the detail under `source` (a request id or a path)."""
    return ApiError(
        f"the server failed to answer this request ({source}); its log has the cause",
        status=500,
        kind="server_error",
        code="internal_error",
    )


def not_found_error(method: str, path: str, routes: Sequence[BaseRoute]) -> ApiError:
    """Return a 404 that lists the routes. If the path belongs to another API of OpenAI or vLLM, the 404 names it."""
    first = path.removeprefix("/v1").strip("/").partition("/")[0]
    missing_api = (
        f"this server has no {MISSING_APIS[first]}; " if path.startswith("/v1/") and first in MISSING_APIS else ""
    )
    served = ", ".join(route.path for route in routes if isinstance(route, Route) and route.path != path)
    message = f"{missing_api}nothing is served under {method[:MAX_METHOD]} {truncated_repr(path)}; served are {served}"
    return ApiError(message, status=NOT_FOUND, code="unknown_url")


def truncated_repr(value: Any) -> str:
    """Return a value as text for an error message, cut to `MAX_QUOTED_CHARACTERS`. A large value takes no more time
    than a small one.
    """
    text = ""
    for chunk in _repr_chunks(value):
        text += chunk
        if len(text) > MAX_QUOTED_CHARACTERS:
            return text[: MAX_QUOTED_CHARACTERS - 3] + "..."
    return text


def _repr_chunks(value: Any) -> Iterator[str]:
    """Yield `repr(value)` in chunks. Each string in the value is cut after `MAX_QUOTED_CHARACTERS` + 1 characters."""
    if isinstance(value, str):
        yield repr(value[: MAX_QUOTED_CHARACTERS + 1])
    elif isinstance(value, list):
        yield "["
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from _repr_chunks(item)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for index, (key, item) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _repr_chunks(key)
            yield ": "
            yield from _repr_chunks(item)
        yield "}"
    else:
        yield repr(value)


def field_path(*parts: object) -> str:
    """Return the path of a field, such as `messages.0.role`, cut to `MAX_PATH` characters."""
    text = ".".join(str(part)[:MAX_PATH] for part in parts)
    return text if len(text) <= MAX_PATH else text[: MAX_PATH - 3] + "..."


def from_validation_error(error: ValidationError, *parent_path: object) -> ApiError:
    """Return the first error in a pydantic `ValidationError` as a 400. Its message is one line, begins with the field's
    path, and uses the terms of JSON. `parent_path` is the path of the value that was validated.
    """
    complaint = error.errors(include_url=False)[0]
    param = field_path(*parent_path, *complaint["loc"])
    complaint_type = complaint["type"]
    if complaint_type == "missing":
        return invalid_value(param, "required", "missing_required_parameter")
    if complaint_type == "value_error":
        message = str(complaint["msg"]).removeprefix("Value error, ")
    else:
        message = f"{_in_json_terms(complaint_type, complaint)}, got {truncated_repr(complaint['input'])}"
    is_type_error = complaint_type.endswith("_type")
    return invalid_value(param, message, "invalid_type" if is_type_error else "invalid_value")


def _in_json_terms(complaint_type: str, complaint: Mapping[str, Any]) -> str:
    """Return pydantic's error message in terms of JSON, not of Python. `complaint` is an entry of `error.errors()`."""
    context = complaint.get("ctx", {})
    if complaint_type == "too_short":
        min_length = context["min_length"]
        return "must not be empty" if min_length == 1 else f"must have at least {min_length} items"
    if complaint_type == "too_long":
        return f"must have at most {context['max_length']} items"
    if complaint_type == "string_pattern_mismatch":  # patterns are [A-Za-z0-9._:-]{1,MOST}, with different limits
        max_length = context["pattern"].removesuffix("}$").rpartition(",")[2]
        return f"must be 1 to {max_length} letters, digits or any of . _ : -"
    if complaint_type in MESSAGE_OF_TYPE:
        return MESSAGE_OF_TYPE[complaint_type]
    return str(complaint["msg"]).replace("Input should", "must", 1)


MESSAGE_OF_TYPE: Mapping[str, str] = {
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "extra_forbidden": "unknown field",
    "finite_number": "must be a finite number",
    "string_too_short": "must have 1 to 256 characters",
    "string_too_long": "must have 1 to 256 characters",
}


def install_error_handlers(app: FastAPI, envelope_of: Callable[[Scope], Envelope]) -> None:
    """Install the handlers that answer every error, routing errors too, in the form of the API that was called. If the
    client has left, the answer is an empty 499, which only the log and the metrics show.
    """

    async def handle_routing_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        api_error = ApiError(str(error.detail), status=error.status_code, headers=error.headers)
        if error.status_code == NOT_FOUND:
            api_error = not_found_error(request.method, request.url.path, app.routes)
        return api_error.response(envelope_of(request.scope))

    async def handle_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response(envelope_of(request.scope))

    async def handle_client_disconnected(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def handle_unexpected_error(request: Request, error: Exception) -> Response:
        return internal_error(request.url.path).response(envelope_of(request.scope))

    app.add_exception_handler(HTTPException, handle_routing_error)
    app.add_exception_handler(ApiError, handle_api_error)
    app.add_exception_handler(ClientDisconnectedError, handle_client_disconnected)
    app.add_exception_handler(Exception, handle_unexpected_error)
