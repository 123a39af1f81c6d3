"""The app's own ASGI middleware, from the inside out: HEAD requests, draining, access control, redirects, access log.

Requests are denied by default: without a key, only GET and HEAD of the pages in `OPEN` pass. A key of scope admin may
use every route; `SCOPES` lists the routes for other keys. The routes themselves decide which route a request matches,
so the guard and the router cannot disagree about a path.
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
from cluster.api.core.api_keys import OPEN, PAGE, ApiKey, ApiKeys
from cluster.api.core.api_keys import Scope as KeyScope
from cluster.api.core.errors import CLIENT_GONE, ApiError, Envelope
from cluster.api.core.sequences import OutputSequence, usage
from cluster.api.core.service import Service
from cluster.observability.logs import request_id
from cluster.observability.metrics import Outcome

OF_PATHS: Mapping[str, Envelope] = {"/v1/messages": anthropic_envelope}
"""Maps a path to the envelope for this path and all paths below it. All other paths use OpenAI's envelope."""


def envelope_of(scope: Scope) -> Envelope:
    """Return the envelope for errors of a request, also for a path without a route."""
    path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
    for above, envelope in OF_PATHS.items():
        if path == above or path.startswith(f"{above}/"):
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

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


GENERATION = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
REFUSED = GENERATION | {"/ready"}
RETRY_AFTER_S = 5  # about the time until another server, or the next one at this address, is ready
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
    **dict.fromkeys(PAGE, "use"),
}
"""The scope that each declared path needs. A route that is missing here needs scope admin."""
KEY, ANONYMOUS = "aerie.key", "aerie.anonymous"
POLICY_VIOLATION = 1008  # the close code of a refused websocket


def key_of(call: Scope) -> ApiKey | None:
    """Return the API key of a call, or None if the server has no keys or the call came without a key."""
    key: ApiKey | None = call.get(KEY)
    return key


def is_anonymous(call: Scope) -> bool:
    """Return whether a call came without a key to a server that has keys. Its answer names no causes of faults."""
    return ANONYMOUS in call


class Guard:
    """ASGI middleware that denies a call whose key does not have the scope that the route needs."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, routes: Sequence[BaseRoute]) -> None:
        """`routes` is the app's own list of routes; routes that are added later also count."""
        self._app, self._keys, self._routes = app, keys, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, or deny it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        elif (denied := self._denied(scope)) is not None:
            await denied.response(envelope_of(scope))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _denied(self, call: Scope) -> ApiError | None:
        """Return the error that denies a call. For an allowed call, note its key in the scope and return None."""
        token, route = _token(call), self._route(call)
        key = None if token is None else self._keys.find(token)
        if key is not None:
            call[KEY] = key
            needed = "use" if route is None else SCOPES.get(route, "admin")  # without a route the answer is a 404
            return None if key.scope == "admin" or needed == "use" else _not_allowed()
        if route in OPEN and call["method"] in ("GET", "HEAD"):
            call[ANONYMOUS] = True
            return None
        return _no_key(token)

    def _route(self, call: Scope) -> str | None:
        """Return the declared path of the first route that matches the call's path with any method; None if no route
        does.
        """
        for route in self._routes:
            if route.matches(call)[0] is not Match.NONE:
                return getattr(route, "path", "")
        return None


def _token(call: Scope) -> bytes | None:
    """Return a call's key: its Bearer token or Anthropic's x-api-key. None if the call has no key or two different
    keys.
    """
    tokens = set()
    for name, value in call["headers"]:
        if name == b"x-api-key":
            tokens.add(value.strip())
        elif name == b"authorization":
            kind, _, token = value.strip().partition(b" ")
            if kind.lower() == b"bearer":
                tokens.add(token.strip())
    return tokens.pop() if len(tokens) == 1 else None


def _no_key(token: bytes | None) -> ApiError:
    wrong = "the API key is not valid" if token else "an API key is needed, and no more than one"
    return ApiError(
        f"{wrong}; send it as 'Authorization: Bearer KEY'",
        status=401,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _not_allowed() -> ApiError:
    return ApiError(
        "this needs an API key of scope admin", status=403, kind="permission_error", code="insufficient_permissions"
    )


def cache_salt(key: ApiKey | None, said: str | None) -> int:
    """Return the salt of a request; only requests with the same salt share cached prefixes. The salt is a hash of
    `said` (the body's `cache_salt`) keyed by the API key, or 0 if both are None. So no client can choose a `cache_salt`
    that leads to the salt of another key.
    """
    if key is None and said is None:
        return 0
    secret = b"" if key is None else key.digest
    text = (said or "").encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, key=secret, digest_size=16, person=b"aerie cache salt").digest(), "big")


class SlashBehindPrefix:
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
        there = f"./{quote(prefix.rpartition('/')[2])}/{query}"
        await Response(status_code=307, headers={"Location": there})(scope, receive, send)


logger = logging.getLogger(__name__)
access_logger = logging.getLogger("cluster.api.http.access_log")  # the name by which operators filter the log

UNLOGGED = frozenset({"/health", "/ready", "/metrics", "/server_state"})  # polled every few seconds
OTHER = "other"  # the route under which all paths without a declared route are counted
NOTED = "aerie.choices"  # key of the scope under which `note` keeps the sequences of a call
SHOWN = 200  # characters of a path that a line shows


def note(scope: Scope, call_id: str, choices: Sequence[OutputSequence]) -> None:
    """Attach the id and the sequences of a parsed call to its scope, for the access log."""
    request_id.set(call_id)
    scope[NOTED] = choices


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
        """`routes` are the declared paths; all other paths are counted together under `OTHER`."""
        self._app = app
        self._service = service
        self._routes = frozenset(routes)
        service.metrics.expect_routes([*sorted(self._routes), OTHER])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, count its response and log it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived = time.perf_counter()
        token = request_id.set("")
        status, whole = 0, False

        async def noting(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                whole = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            status = status or CLIENT_GONE
            raise
        except Exception:
            status = status or 500
            raise
        finally:
            route = self._route(scope)
            self._service.metrics.on_response(route, status or CLIENT_GONE)
            if route not in UNLOGGED:
                access_logger.info(
                    "%s %s",
                    scope["method"],
                    scope["path"][:SHOWN],
                    extra={"fields": _fields(scope, status, whole, arrived)},
                )
            request_id.reset(token)

    def _route(self, scope: Scope) -> str:
        declared = getattr(scope.get("route"), "path", scope["path"])
        return declared if declared in self._routes else OTHER


def _fields(scope: Scope, status: int, whole: bool, arrived: float) -> dict[str, Any]:
    """Return the fields of a log line, except method and path. A value that is not known is None."""
    fields: dict[str, Any] = {"status": status or CLIENT_GONE}
    if (key := key_of(scope)) is not None:
        fields["key"] = key.name
    choices: Sequence[OutputSequence] = scope.get(NOTED, ())
    timers = [choice.timer for choice in choices if choice.timer is not None]
    if choices:
        used = usage(choices)
        firsts = [timer.first_token_s for timer in timers if timer.first_token_s is not None]
        fields["prompt_tokens"] = used["prompt_tokens"]
        fields["completion_tokens"] = used["completion_tokens"]
        fields["first_token_s"] = round(min(firsts), 4) if firsts else None
    fields["total_s"] = round(time.perf_counter() - arrived, 4)
    fields["outcome"] = _outcome({timer.outcome for timer in timers}, status, whole)
    return fields


def _outcome(ends: set[Outcome | None], status: int, whole: bool) -> str:
    if status in (0, CLIENT_GONE):
        return "gone"
    if "error" in ends or (status >= 500 and status != 503):
        return "error"
    if status >= 400:
        return "refused"
    return "ok" if whole and "abort" not in ends else "gone"
