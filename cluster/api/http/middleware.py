"""The app's own ASGI middleware, from the inside out: HEAD requests, draining, access control, redirects, access log.

A server that has API keys denies requests by default: without a key, only GET and HEAD of the paths in
`PATHS_WITHOUT_KEY` pass. A key of scope admin may use every route. A key of scope use may use only the routes with this
scope in `SCOPES`. `Guard` matches a path by the app's own routes, so `Guard` and the app always choose the same route.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from fastapi.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.anthropic.shape import anthropic_envelope
from cluster.api.core.api_keys import PAGE_PATHS, PATHS_WITHOUT_KEY, ApiKey, ApiKeys
from cluster.api.core.api_keys import Scope as KeyScope
from cluster.api.core.errors import CLIENT_CLOSED_REQUEST, ApiError, Envelope
from cluster.api.core.sequences import OutputSequence, usage
from cluster.api.core.service import Service
from cluster.observability.logs import request_id
from cluster.observability.metrics import Outcome

ENVELOPE_BY_PATH: Mapping[str, Envelope] = {"/v1/messages": anthropic_envelope}
"""Maps a path to the envelope (the function that makes the body of an error) for this path and all paths below it. All
other paths use OpenAI's envelope.
"""


def envelope_of(scope: Scope) -> Envelope:
    """Return the function that makes the body of an error for a request. The path of the request may have no route."""
    path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
    for path_prefix, envelope in ENVELOPE_BY_PATH.items():
        if path == path_prefix or path.startswith(f"{path_prefix}/"):
            return envelope
    return ApiError.envelope


class HeadAsGet:
    """ASGI middleware that passes a HEAD request to the app as a GET and drops the body of the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_without_body)


GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
DRAINED_PATHS = GENERATION_PATHS | {"/ready"}
RETRY_AFTER_S = 5  # about the time until another server, or the next one at this address, is ready
# While draining, `aerie serve` repeats its call of `Drain.begin`. If none comes for DRAIN_LEASE_S, `aerie serve` was
# killed, and the replica accepts calls again.
DRAIN_LEASE_S = 30.0
SHUTTING_DOWN = "the server is shutting down"


class Drain:
    """Knows whether one replica refuses new calls, and how many calls are open. It is used only on the event loop that
    serves the calls.
    """

    def __init__(self) -> None:
        self.open_calls = 0
        self._refuse_until = 0.0

    @property
    def refusing(self) -> bool:
        """Whether new calls are refused now."""
        return time.monotonic() < self._refuse_until

    def begin(self) -> int:
        """Refuse new calls for the next `DRAIN_LEASE_S` seconds, and return the number of open calls. `aerie serve`
        calls this repeatedly until the server ends.
        """
        if not self.refusing:
            logger.info("draining: %d open calls go on, new ones are refused", self.open_calls)
        self._refuse_until = time.monotonic() + DRAIN_LEASE_S
        return self.open_calls

    @contextmanager
    def count_call(self) -> Iterator[None]:
        """Count a call as open inside the block."""
        self.open_calls += 1
        try:
            yield
        finally:
            self.open_calls -= 1


class DrainMiddleware:
    """ASGI middleware that counts the open calls of routes that generate text. While the server drains, it answers new
    calls of these routes, and /ready, with a 503.
    """

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, or refuse it while draining."""
        path = scope.get("path")
        if scope["type"] != "http" or path not in DRAINED_PATHS:
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
        elif path in GENERATION_PATHS:
            with self._drain.count_call():
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)


SCOPES: Mapping[str, KeyScope] = {
    "/health": "use",
    "/ready": "use",
    "/v1/completions": "use",
    "/v1/chat/completions": "use",
    "/v1/responses": "use",
    "/v1/responses/input_tokens": "use",
    "/v1/responses/{response_id:path}": "use",
    "/v1/messages": "use",
    "/v1/messages/count_tokens": "use",
    "/v1/models": "use",
    "/v1/models/{model_id:path}": "use",
    "/tokenize": "use",
    "/detokenize": "use",
    "/metrics": "use",
    "/version": "use",
    "/openapi.json": "use",
    "/docs": "use",
    "/server_info": "admin",  # paths, addresses, process ids, causes of faults
    "/server_state": "use",  # no paths, addresses or process ids; only admins get causes of faults
    **dict.fromkeys(PAGE_PATHS, "use"),
}
"""The scope that each declared path needs. A route that is missing here needs scope admin."""
KEY_ENTRY, ANONYMOUS_ENTRY = "aerie.key", "aerie.anonymous"  # `Guard` sets these keys in the ASGI scope
POLICY_VIOLATION = 1008  # the close code of a refused websocket


def key_of(scope: Scope) -> ApiKey | None:
    """Return the API key of a call, or None if the server has no keys or the call came without a key."""
    key: ApiKey | None = scope.get(KEY_ENTRY)
    return key


def is_anonymous(scope: Scope) -> bool:
    """Return whether a call came without a key to a server that has keys. Its answer names no causes of faults."""
    return ANONYMOUS_ENTRY in scope


class Guard:
    """ASGI middleware that denies a call without a valid key, except for the paths that need none, and a call whose key
    does not have the scope that the route needs.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, routes: Sequence[BaseRoute]) -> None:
        """`routes` is the app's own list of routes; routes that are added later also count."""
        self._app, self._keys, self._routes = app, keys, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, or deny it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        elif (error := self._access_error(scope)) is not None:
            await error.response(envelope_of(scope))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _access_error(self, scope: Scope) -> ApiError | None:
        """Return the error that denies a call, or None if the call is allowed. The API key of an allowed call is stored
        in the ASGI scope.
        """
        token, route = _token_of(scope), self._route(scope)
        key = None if token is None else self._keys.find(token)
        if key is not None:
            scope[KEY_ENTRY] = key
            # without a route the answer is a 404
            required_scope = "use" if route is None else SCOPES.get(route, "admin")
            return None if key.scope == "admin" or required_scope == "use" else _insufficient_scope_error()
        if route in PATHS_WITHOUT_KEY and scope["method"] in ("GET", "HEAD"):
            scope[ANONYMOUS_ENTRY] = True
            return None
        return _invalid_key_error(token)

    def _route(self, scope: Scope) -> str | None:
        """Return the declared path of the first route that matches the call's path, with any method. Return None if no
        route matches.
        """
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return getattr(route, "path", "")
        return None


def _token_of(scope: Scope) -> bytes | None:
    """Return the key in a call's headers: the Bearer token, or the value of Anthropic's x-api-key. Return None if the
    headers have no key, or two different keys.
    """
    tokens = set()
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            tokens.add(value.strip())
        elif name == b"authorization":
            kind, _, token = value.strip().partition(b" ")
            if kind.lower() == b"bearer":
                tokens.add(token.strip())
    return tokens.pop() if len(tokens) == 1 else None


def _invalid_key_error(token: bytes | None) -> ApiError:
    problem = "the API key is not valid" if token else "an API key is needed, and no more than one"
    return ApiError(
        f"{problem}; send it as 'Authorization: Bearer KEY'",
        status=401,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _insufficient_scope_error() -> ApiError:
    return ApiError(
        "this needs an API key of scope admin", status=403, kind="permission_error", code="insufficient_permissions"
    )


def cache_salt(key: ApiKey | None, client_salt: str | None) -> int:
    """Return the salt of a request; only requests with the same salt share cached prefixes. The salt is a hash of
    `client_salt` (the body's `cache_salt`) keyed by the API key, or 0 if both are None. So no client can choose a
    `cache_salt` that leads to the salt of another key.
    """
    if key is None and client_salt is None:
        return 0
    secret = b"" if key is None else key.digest
    text = (client_salt or "").encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, key=secret, digest_size=16, person=b"aerie cache salt").digest(), "big")


class TrailingSlashRedirect:
    """ASGI middleware that redirects the application's prefix without a slash (`/llm/one`) to the page at `/llm/one/`.

    The page names its files by relative paths. The redirect is relative too, since a proxy in front may add a prefix.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Redirect the request, or pass it on."""
        prefix = scope.get("root_path", "").rstrip("/")
        if scope["type"] != "http" or not prefix or scope["path"] != prefix:
            await self._app(scope, receive, send)
            return
        query = "?" + scope["query_string"].decode("latin-1") if scope["query_string"] else ""
        location = f"./{quote(prefix.rpartition('/')[2])}/{query}"
        await Response(status_code=307, headers={"Location": location})(scope, receive, send)


logger = logging.getLogger(__name__)
access_logger = logging.getLogger("cluster.api.http.access_log")  # the name by which operators filter the log

UNLOGGED = frozenset({"/health", "/ready", "/metrics", "/server_state"})  # clients ask for them every few seconds
OTHER_ROUTE = "other"  # the route under which all paths without a declared route are counted
CHOICES_ENTRY = "aerie.choices"  # key of the ASGI scope under which `attach_call` stores the sequences of a call
MAX_LOGGED_PATH = 200  # characters of a path that a line shows


def attach_call(scope: Scope, call_id: str, choices: Sequence[OutputSequence]) -> None:
    """Attach the id and the sequences of a parsed call to its scope, for the access log."""
    request_id.set(call_id)
    scope[CHOICES_ENTRY] = choices


class AccessLog:
    """The app's outermost ASGI middleware: logs the method, path, tokens, duration and outcome of each call.

    `outcome` is one of:

    - "ok": the whole answer was sent, with a status below 400.
    - "gone": the client disconnected before the end.
    - "refused": the call never began (4xx, or 503 because of load or draining).
    - "error": the server failed or shut down during the call (503, another 5xx, or an error event in a stream that
      began with 200).

    `first_token_s` and `total_s` are seconds since the call arrived.
    """

    def __init__(self, app: ASGIApp, service: Service, routes: Iterable[str]) -> None:
        """`routes` are the declared paths; all other paths are counted together under `OTHER_ROUTE`."""
        self._app = app
        self._service = service
        self._routes = frozenset(routes)
        service.metrics.expect_routes([*sorted(self._routes), OTHER_ROUTE])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, count its response and log it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived_at = time.perf_counter()
        context_token = request_id.set("")
        status, body_complete = 0, False

        async def send_and_record(message: Message) -> None:
            nonlocal status, body_complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                body_complete = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_record)
        except asyncio.CancelledError:
            status = status or CLIENT_CLOSED_REQUEST
            raise
        except Exception:
            status = status or 500
            raise
        finally:
            route = self._route(scope)
            self._service.metrics.on_response(route, status or CLIENT_CLOSED_REQUEST)
            if route not in UNLOGGED:
                access_logger.info(
                    "%s %s",
                    scope["method"],
                    scope["path"][:MAX_LOGGED_PATH],
                    extra={"fields": _log_fields(scope, status, body_complete, arrived_at)},
                )
            request_id.reset(context_token)

    def _route(self, scope: Scope) -> str:
        path = getattr(scope.get("route"), "path", scope["path"])
        return path if path in self._routes else OTHER_ROUTE


def _log_fields(scope: Scope, status: int, body_complete: bool, arrived_at: float) -> dict[str, Any]:
    """Return the fields of a log line, except method and path. The fields about a key or about tokens are left out if
    the call has none; `first_token_s` is None if no token came.
    """
    fields: dict[str, Any] = {"status": status or CLIENT_CLOSED_REQUEST}
    if (key := key_of(scope)) is not None:
        fields["key"] = key.name
    choices: Sequence[OutputSequence] = scope.get(CHOICES_ENTRY, ())
    timers = [choice.timer for choice in choices if choice.timer is not None]
    if choices:
        token_usage = usage(choices)
        first_token_times = [timer.first_token_s for timer in timers if timer.first_token_s is not None]
        fields["prompt_tokens"] = token_usage["prompt_tokens"]
        fields["completion_tokens"] = token_usage["completion_tokens"]
        fields["first_token_s"] = round(min(first_token_times), 4) if first_token_times else None
    fields["total_s"] = round(time.perf_counter() - arrived_at, 4)
    fields["outcome"] = _outcome({timer.outcome for timer in timers}, status, body_complete)
    return fields


def _outcome(outcomes: set[Outcome | None], status: int, body_complete: bool) -> str:
    if status in (0, CLIENT_CLOSED_REQUEST):
        return "gone"
    if "error" in outcomes or (status >= 500 and status != 503):
        return "error"
    if status >= 400:
        return "refused"
    return "ok" if body_complete and "abort" not in outcomes else "gone"
