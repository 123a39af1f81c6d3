"""Middleware in front of Serve's HTTP proxy: buffers requests, passes them on one by one, and turns errors into JSON.

By itself, Serve's proxy has four weaknesses:
- It answers in plain text where the application cannot answer: while there is no replica, when a replica dies before
  it has answered, and when a request takes too long or finds Serve's queue full.
- It decodes some request headers before the application sees them, and fails on bytes that are not text.
- It forwards each chunk of a body by a call of some milliseconds, so a few hundred clients that send one byte per
  second would keep it busy.
- It begins requests as they arrive, hundreds in one iteration of its event loop, while open streams wait.

Serve calls `middlewares` in each proxy before it creates the HTTP server, if the environment variable
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this function. `aerie serve` sets the variable; on other clusters it
must be set on the nodes. `middlewares` also replaces uvicorn's connection class (`connections`), and makes the proxy
record which limit of Serve ends a call (`serve_limits`). Nothing heavy is imported here, since this runs in the proxy.
"""

import asyncio
import importlib
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.proxy import serve_limits
from cluster.api.proxy.body_time_limit import GRACE_S, SlowBodyError, read_chunks
from cluster.api.proxy.lingering import Lingering
from cluster.api.proxy.refusals import Refusals
from cluster.api.proxy.serve_limits import ServeLimit
from cluster.api.proxy.throttle import Throttle

CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
IMPORT_PATH = "cluster.api.proxy:middlewares"
CONNECTION = "cluster.api.proxy.connections:Connection"  # by name, since importing it imports uvicorn
RETRY_AFTER = (b"retry-after", b"1")
NO_RETRY = (b"x-should-retry", b"false")  # without it, OpenAI's and Anthropic's clients retry a request after a 408
MAX_HEADER_LENGTH = 256  # characters of a header in HEADERS_OF_SERVE
# Serve decodes these headers. With x-request-disconnect-disabled, a request would go on after its client has left.
HEADERS_OF_SERVE = frozenset(
    {
        b"x-request-id",
        b"x-request-timeout-seconds",
        b"x-session-id",
        b"session-id",
        b"serve-multiplexed-model-id",
        b"x-request-disconnect-disabled",
    }
)
REMOVED_HEADER = b"x-request-disconnect-disabled"  # not passed on to Serve
# status: (type, code, message) of the error that replaces a plain-text error of Serve, or a missing answer
ERROR_BY_STATUS: Mapping[int, tuple[str, str, str]] = {
    404: ("invalid_request_error", "not_found", "no application serves this path"),
    408: ("server_error", "request_timeout", "the request took longer than this server allows; ask for fewer tokens"),
    429: ("overloaded_error", "overloaded", "the server is full; try again shortly"),
    500: ("server_error", "replica_lost", "the replica that served this request was lost; send it again"),
    503: ("server_error", "engine_unhealthy", "no replica serves requests now; try again shortly"),
}
MESSAGES = "/v1/messages"
ANTHROPIC_TYPES = {"not_found": "not_found_error", "server_error": "api_error"}  # keys: our codes and types
MAX_BUFFERED_BODY = 1 << 20  # bytes of a body that are buffered before it is passed on; the rest is passed on in chunks
MAX_BUFFERED_TOTAL = 256 << 20  # bytes buffered for all requests together; beyond, bodies are passed on as they come
HEALTHZ = b"/-/healthz"  # Serve's own health page, passed through unchanged
HEALTH_PAGES = ("/health", "/ready")  # the application's health pages
TIMEOUT_HEADER = b"x-request-timeout-seconds"  # a client's own limit; it replaces http_options.request_timeout_s
ROUTES = "/-/routes"  # Serve's list of applications; not served, since it has no access control


def middlewares() -> list[Middleware]:
    """Return the middleware that Serve is to install, the outermost last. Patch uvicorn and Serve in this process."""
    importlib.import_module("uvicorn.config").HTTP_PROTOCOLS["auto"] = CONNECTION
    serve_limits.patch_proxy()
    return [Middleware(JsonErrors), Middleware(BufferedRequests), Middleware(Lingering)]


def proxies_use_middlewares() -> bool:
    """Return whether this cluster's proxies use `middlewares`: replicas and proxies have the same environment."""
    return os.environ.get(CALLBACK) == IMPORT_PATH


class BufferedRequests:
    """ASGI middleware that passes a request on once its body has arrived, one request per iteration of the event loop.
    Of a long body it waits for the first MiB only, and of no body if too much is buffered. While all replicas are known
    to be full, it answers with the refusal of one of them instead.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._throttle = Throttle()
        self._buffered_bytes = 0
        self._refusals = Refusals(self._throttle.interrupt)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on. A body that arrives too slowly gets a 408. If the client has left, drop the request."""
        if scope["type"] != "http" or scope.get("raw_path", b"") == HEALTHZ:
            await self._app(scope, receive, send)
            return
        body = bytearray()

        def consume(chunk: bytes) -> bool:
            body.extend(chunk)
            self._buffered_bytes += len(chunk)
            return len(body) < MAX_BUFFERED_BODY and self._buffered_bytes < MAX_BUFFERED_TOTAL

        try:
            more_body = self._buffered_bytes >= MAX_BUFFERED_TOTAL or await read_chunks(receive, consume, GRACE_S)
        except SlowBodyError as slow_body:
            error = ("invalid_request_error", "request_timeout", str(slow_body))
            await _send_error(send, 408, error, None, scope, [(b"connection", b"close")])
            return
        finally:
            self._buffered_bytes -= len(body)
        if more_body is None:
            return
        if await self._send_current_refusal(scope, send):
            return
        body_bytes = len(body)
        buffered_request = _BufferedRequest(
            {"type": "http.request", "body": bytes(body), "more_body": more_body}, receive
        )
        body.clear()  # free the body now, not when the answer ends
        try:
            while not await self._throttle.wait():  # False: a new refusal may apply to this request
                if await self._send_current_refusal(scope, send):
                    return
            if not buffered_request.client_left:
                self._throttle.on_begin(body_bytes)
                refusals = self._refusals
                recording_send = refusals.recording_send(scope, self._reporting_send(send))
                await self._app(refusals.forwarded_scope(scope), buffered_request.receive, recording_send)
        finally:
            buffered_request.close()

    async def _send_current_refusal(self, scope: Scope, send: Send) -> bool:
        """If all replicas are known to be full, answer with the refusal of one of them and return True. Otherwise
        return False.
        """
        if (refusal := self._refusals.current_refusal(scope)) is None:
            return False
        await refusal.send(send)
        return True

    def _reporting_send(self, send: Send) -> Send:
        """Return a `send` for a request that begins. It tells the `Throttle` if the answer is an error."""

        async def send_and_report(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._throttle.on_refused()
            await send(message)

        return send_and_report


class _BufferedRequest:
    """The ASGI messages of a request as the app receives them: first the buffered body, then what the client sends
    later.
    """

    def __init__(self, first: Message, receive: Receive) -> None:
        self._first: Message | None = first
        self._receive = receive
        self._next: asyncio.Future[Message] | None = asyncio.ensure_future(receive())

    @property
    def client_left(self) -> bool:
        """Whether the client has already disconnected, so that nobody would read the answer."""
        next_message = self._next
        return next_message is not None and next_message.done() and next_message.result()["type"] == "http.disconnect"

    async def receive(self) -> Message:
        """Return the next message."""
        if self._first is not None:
            message, self._first = self._first, None
            return message
        next_message, self._next = self._next, None
        return await (next_message or self._receive())

    def close(self) -> None:
        """Stop waiting for a message; call it once `receive` is not called any more."""
        if self._next is not None:
            self._next.cancel()


class JsonErrors:
    """ASGI middleware that turns plain-text errors of Serve's proxy into JSON. If the proxy does not end an answer, the
    middleware ends it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. A plain-text error becomes JSON; a header that Serve cannot decode gets a 400."""
        if scope["type"] != "http" or scope.get("raw_path", b"") == HEALTHZ:
            await self._app(scope, receive, send)
            return
        if scope["path"][len(scope.get("root_path", "")) :] == ROUTES:  # Serve compares the path in the same way
            await _send_error(send, 404, ERROR_BY_STATUS[404], None, scope)
            return
        if (invalid_header := _invalid_header(scope["headers"])) is not None:
            error = (
                "invalid_request_error",
                "invalid_value",
                f"{invalid_header}: must be at most {MAX_HEADER_LENGTH} printable ASCII characters",
            )
            await _send_error(send, 400, error, invalid_header, scope)
            return
        headers = [pair for pair in scope["headers"] if pair[0] != REMOVED_HEADER]
        with serve_limits.record_limit() as limit:
            response = _ResponseFilter(send, scope, limit, self._has_replicas)
            try:
                await self._app({**scope, "headers": headers}, receive, response.send)
            finally:
                await response.finish()

    async def _has_replicas(self, scope: Scope) -> bool:
        """Return whether Serve's own health page answers 200. A request for this page does not wait in the queue of a
        deployment.
        """
        statuses: list[int] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        path = scope.get("root_path", "") + HEALTHZ.decode()
        await self._app({**scope, "method": "GET", "path": path, "raw_path": path.encode()}, receive, send)
        return statuses == [200]


class _ResponseFilter:
    """Inspects the messages of one answer and replaces plain-text errors."""

    def __init__(
        self, send: Send, scope: Scope, limit: ServeLimit, has_replicas: Callable[[Scope], Awaitable[bool]]
    ) -> None:
        """`limit` gets its values when a limit of Serve ends the call. `has_replicas` is `JsonErrors._has_replicas`."""
        self._send = send
        self._scope = scope
        self._limit = limit
        self._has_replicas = has_replicas
        self._started = self._ended = self._replaced = self._streams = False

    async def send(self, message: Message) -> None:
        """Pass a message on, or send a JSON error in place of a plain-text one."""
        if message["type"] == "http.response.start":
            self._started = True
            content_type = dict(message["headers"]).get(b"content-type", b"")
            self._streams = content_type.startswith(b"text/event-stream")
            status = message["status"]
            if status >= 400 and content_type.startswith(b"text/plain") and status in ERROR_BY_STATUS:
                self._replaced = True
                kept_headers = [
                    pair for pair in message["headers"] if pair[0].lower() in (b"retry-after", b"x-request-id")
                ]
                await self._send_json_error(status, kept_headers)
                return
        if message["type"] == "http.response.body":
            self._ended = self._ended or not message.get("more_body", False)
        if not self._replaced:
            await self._send(message)

    async def _send_json_error(self, status: int, kept_headers: list[tuple[bytes, bytes]]) -> None:
        """Send the JSON error that replaces a plain-text error.

        There is one exception. If Serve rejects a call of a health page because its queue is full, and Serve reports
        healthy replicas, answer 200, because a full queue is no sign of a fault.
        """
        is_health_check = self._scope["method"] in ("GET", "HEAD") and self._scope["path"].endswith(HEALTH_PAGES)
        if is_health_check and self._limit.max_queued_requests is not None and await self._has_replicas(self._scope):
            await self._send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await self._send({"type": "http.response.body", "body": b""})
            return
        await _send_error(
            self._send,
            status,
            _limit_error(self._limit, self._scope) or ERROR_BY_STATUS[status],
            None,
            self._scope,
            kept_headers,
        )

    async def finish(self) -> None:
        """Call this when Serve sends nothing more. If there is no answer or an event stream is open, send an error as
        the answer or as the last event.
        """
        error = _limit_error(self._limit, self._scope) or ERROR_BY_STATUS[500]
        if not self._started:
            await _send_error(self._send, 503, error, None, self._scope)
        elif self._streams and not self._ended:
            name = b"event: error\n" if _is_anthropic(self._scope) else b""
            event = name + b"data: " + _error_body(error, None, self._scope) + b"\n\n"
            await self._send({"type": "http.response.body", "body": event, "more_body": False})


def _limit_error(limit: ServeLimit, scope: Scope) -> tuple[str, str, str] | None:
    """Return the error (type, code, message) for the limit of Serve that ended a call, or None if no limit ended it."""
    if limit.max_queued_requests is not None:
        message = (
            f"the queue of this server is full (max_queued_requests: {limit.max_queued_requests}); try again shortly"
        )
        return "overloaded_error", "overloaded", message
    if limit.timeout_s is not None:
        set_by_client = any(name == TIMEOUT_HEADER for name, _ in scope["headers"])
        limit_text = (
            "the limit that it set itself (x-request-timeout-seconds)" if set_by_client else "the limit of this server"
        )
        setting = "" if set_by_client else " (http_options.request_timeout_s)"
        message = f"the request took longer than {limit.timeout_s:g} s, {limit_text}{setting}; ask for fewer tokens"
        return "server_error", "request_timeout", message
    return None


def _invalid_header(headers: list[tuple[bytes, bytes]]) -> str | None:
    """Return the name of the first of Serve's headers that Serve could not decode or that is too long, or None."""
    for name, value in headers:
        if name.lower().replace(b"_", b"-") in HEADERS_OF_SERVE:
            printable = all(0x20 <= byte < 0x7F for byte in value)
            if not printable or len(value) > MAX_HEADER_LENGTH:
                return name.decode("ascii", "replace")
    return None


def _is_anthropic(scope: Scope) -> bool:
    """Return whether a request belongs to Anthropic's API, whose clients expect another form of error."""
    return f"{MESSAGES}/" in f"{scope['path']}/"


def _error_body(error: tuple[str, str, str], param: str | None, scope: Scope) -> bytes:
    kind, code, message = error
    if _is_anthropic(scope):
        kind = ANTHROPIC_TYPES.get(code) or ANTHROPIC_TYPES.get(kind, kind)
        return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()
    content: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": content}).encode()


async def _send_error(
    send: Send,
    status: int,
    error: tuple[str, str, str],
    param: str | None,
    scope: Scope,
    extra_headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    body = _error_body(error, param, scope)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *(extra_headers or []),
    ]
    if status in (429, 503) and not any(name.lower() == b"retry-after" for name, _ in headers):
        headers.append(RETRY_AFTER)
    if error[:2] == ERROR_BY_STATUS[408][:2]:
        headers.append(NO_RETRY)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
