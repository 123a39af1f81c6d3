"""Repeats refusals in the proxy: a full replica says how long its refusal holds, and the proxy repeats it until then.

A refusal costs a replica and the proxy together about 10 ms of CPU time. Under load the ranks need this time for open
streams. If the proxy alone repeats a refusal, it costs 1 ms. A full replica adds the header `FULL_HEADER` to its 503.
The header has the replica's id, the number of replicas, and the seconds for which the refusal holds. While the refusals
of all replicas hold, the proxy answers with the refusal that expires last. The next request that the proxy passes on
has the number of such answers in the header `REPEATS_HEADER`, for the metrics.

Nothing heavy is imported here, since `Refusals` runs in the proxy.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

FULL_HEADER = b"x-aerie-full"
REPEATS_HEADER = b"x-aerie-repeated-refusals"
HOLD_SHARE, MAX_HOLD_S = 0.05, 1.0  # a refusal holds for this share of the wait that it announces, at most MAX_HOLD_S
# headers that are the same in every repeat
COPIED_HEADERS = frozenset({b"content-type", b"content-length", b"retry-after"})


def hold_s(wait_s: float) -> float:
    """Return the seconds for which a refusal holds if a new request would wait `wait_s`."""
    return min(HOLD_SHARE * wait_s, MAX_HOLD_S)


@dataclass(frozen=True, slots=True)
class RepeatedRefusal:
    """The refusal of one replica, and the time until which it holds."""

    expires_at: float
    headers: list[tuple[bytes, bytes]]
    body: bytes

    async def send(self, send: Send) -> None:
        """Answer a request with this refusal."""
        await send({"type": "http.response.start", "status": 503, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


class Refusals:
    """Keeps the refusals of full replicas in the proxy, by request path and by replica, so that it can repeat them."""

    def __init__(self, on_new_refusal: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`on_new_refusal` is called whenever a new refusal is stored."""
        self._on_new_refusal = on_new_refusal
        self._clock = clock
        self._refusals: dict[str, dict[str, RepeatedRefusal]] = {}
        self._replicas: dict[str, int] = {}
        self._repeats: dict[str, int] = {}

    def current_refusal(self, scope: Scope) -> RepeatedRefusal | None:
        """Return the refusal with which to answer a request, and count it as a repeat. Return None if a replica may
        have room, or if the request is no POST. Return None too if a browser sent the request (header `origin`),
        because the browser needs the CORS headers that only a replica adds.
        """
        path = scope["path"]
        if (
            scope["method"] != "POST"
            or path not in self._refusals
            or any(name == b"origin" for name, _ in scope["headers"])
        ):
            return None
        now = self._clock()
        refusals = self._refusals[path] = {
            replica: refusal for replica, refusal in self._refusals[path].items() if refusal.expires_at > now
        }
        if not refusals or len(refusals) < self._replicas[path]:
            return None
        self._repeats[path] = self._repeats.get(path, 0) + 1
        return max(refusals.values(), key=lambda refusal: refusal.expires_at)

    def forwarded_scope(self, scope: Scope) -> Scope:
        """Return the ASGI scope of a request that is passed on. If refusals were repeated, the header `REPEATS_HEADER`
        is added. Such a header from the client is removed.
        """
        headers = [pair for pair in scope["headers"] if pair[0].lower() != REPEATS_HEADER]
        if scope["method"] == "POST" and (repeats := self._repeats.pop(scope["path"], 0)):
            headers.append((REPEATS_HEADER, str(repeats).encode()))
        return {**scope, "headers": headers}

    def recording_send(self, scope: Scope, send: Send) -> Send:
        """Return a `send` for a request that is passed on. It stores the refusal if the replica is full, and removes
        the header `FULL_HEADER` from the answer.
        """
        announcement: bytes | None = None
        headers: list[tuple[bytes, bytes]] = []
        body = b""

        async def send_and_record(message: Message) -> None:
            nonlocal announcement, headers, body
            if message["type"] == "http.response.start":
                announcement = next((value for name, value in message["headers"] if name.lower() == FULL_HEADER), None)
                if announcement is not None:
                    headers = [pair for pair in message["headers"] if pair[0].lower() != FULL_HEADER]
                    message = {**message, "headers": headers}
            elif announcement is not None and message["type"] == "http.response.body":
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    self._store(scope["path"], announcement, headers, body)
            await send(message)

        return send_and_record

    def _store(self, path: str, announcement: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        try:
            replica, replicas, hold_seconds = announcement.decode("ascii").split()
            expires_at, num_replicas = self._clock() + float(hold_seconds), int(replicas)
        except ValueError:  # a header of another version: the client gets this answer, but it is not repeated
            return
        copied_headers = [pair for pair in headers if pair[0].lower() in COPIED_HEADERS]
        self._refusals.setdefault(path, {})[replica] = RepeatedRefusal(expires_at, copied_headers, body)
        self._replicas[path] = num_replicas
        self._on_new_refusal()


class AnnounceRefusals:
    """ASGI middleware in the replica. It completes the header `FULL_HEADER`, which has only the seconds before, and
    reports how many refusals the proxy has repeated.
    """

    def __init__(
        self, app: ASGIApp, replica: str, replicas: int | None, on_repeats: Callable[[str, int], None]
    ) -> None:
        """`replica` is the id of this replica. `replicas` is the number of replicas. It is None if this number is not
        fixed, or if the proxy does not use the middleware of this package; `FULL_HEADER` is then removed. `on_repeats`
        is called with a path and the number of refusals that the proxy repeated for this path.
        """
        self._app = app
        self._announcement = None if replicas is None else f"{replica} {replicas}".encode()
        self._on_repeats = on_repeats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, and complete the header `FULL_HEADER` of its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        for name, value in scope["headers"] if self._announcement is not None else ():
            if name == REPEATS_HEADER and value.isdigit():
                path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
                self._on_repeats(path, int(value))
                fields = {"path": path, "refused": int(value)}
                logger.info("the proxy repeated refusals for this replica", extra={"fields": fields})

        async def send_announcement(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0] != FULL_HEADER]
                if self._announcement is not None:
                    headers += [
                        (FULL_HEADER, self._announcement + b" " + value)
                        for name, value in message["headers"]
                        if name == FULL_HEADER
                    ]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_announcement)
