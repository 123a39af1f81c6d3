"""Access log: one line per call, and a count of responses by route and status."""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.core.choices import OutputSequence
from cluster.api.core.errors import CLIENT_GONE
from cluster.api.core.service import Service
from cluster.api.core.usage import usage
from cluster.api.http.guard import key_of
from cluster.observability.logs import request_id
from cluster.observability.metrics import Outcome

logger = logging.getLogger(__name__)

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
                logger.info(
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
