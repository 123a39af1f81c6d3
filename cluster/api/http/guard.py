"""Access control by API key, before a request is routed.

Requests are denied by default: without a key, only GET and HEAD of the pages in `OPEN` pass. A key of scope admin may
use every route; `SCOPES` lists the routes for other keys. The routes themselves decide which route a request matches,
so the guard and the router cannot disagree about a path.
"""

from collections.abc import Mapping, Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Call

from cluster.api.core.api_keys import OPEN, PAGE, ApiKey, ApiKeys, Scope
from cluster.api.core.errors import ApiError
from cluster.api.http.error_envelopes import envelope_of

SCOPES: Mapping[str, Scope] = {
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


def key_of(call: Call) -> ApiKey | None:
    """Return the API key of a call, or None if the server has no keys or the call came without a key."""
    key: ApiKey | None = call.get(KEY)
    return key


def is_anonymous(call: Call) -> bool:
    """Return whether a call came without a key to a server that has keys. Its answer names no causes of faults."""
    return ANONYMOUS in call


class Guard:
    """ASGI middleware that denies a call whose key does not have the scope that the route needs."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, routes: Sequence[BaseRoute]) -> None:
        """`routes` is the app's own list of routes; routes that are added later also count."""
        self._app, self._keys, self._routes = app, keys, routes

    async def __call__(self, scope: Call, receive: Receive, send: Send) -> None:
        """Serve one call, or deny it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        elif (denied := self._denied(scope)) is not None:
            await denied.response(envelope_of(scope))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _denied(self, call: Call) -> ApiError | None:
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

    def _route(self, call: Call) -> str | None:
        """Return the declared path of the first route that matches the call's path with any method; None if no route
        does.
        """
        for route in self._routes:
            if route.matches(call)[0] is not Match.NONE:
                return getattr(route, "path", "")
        return None


def _token(call: Call) -> bytes | None:
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
