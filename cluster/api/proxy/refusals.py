"""Repeats refusals in the proxy: a full replica says how long its refusal holds, and gets no request until then.

A refusal costs a replica and the proxy together some 10 ms of CPU time, which the ranks of open streams lack under
load. The proxy alone repeats a refusal in 1 ms. A full replica adds the header `FULL` to its 503: its id, the number of
replicas, and the seconds for which the refusal holds. While the refusals of all replicas hold, the proxy repeats the
one that expires last. The next request that it passes on carries the number of repeats in the header `REPEATED`, for
the metrics.

Nothing heavy is imported here, since one half runs in the proxy.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

FULL = b"x-aerie-full"
REPEATED = b"x-aerie-repeated-refusals"
HELD_SHARE, HELD_S = 0.05, 1.0  # a refusal holds for this share of the wait that it announces, at most HELD_S seconds
KEPT = frozenset({b"content-type", b"content-length", b"retry-after"})  # headers that are the same in every repeat


def held_s(wait_s: float) -> float:
    """Return the seconds for which a refusal holds if a new request would wait `wait_s`."""
    return min(HELD_SHARE * wait_s, HELD_S)


@dataclass(frozen=True, slots=True)
class RepeatedRefusal:
    """The refusal of one replica, and the time until which it holds."""

    until: float
    headers: list[tuple[bytes, bytes]]
    body: bytes

    async def send(self, send: Send) -> None:
        """Answer a request with this refusal."""
        await send({"type": "http.response.start", "status": 503, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


class Refusals:
    """The proxy's half: the refusals of full replicas, by path of the request and by replica."""

    def __init__(self, learnt: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`learnt` is called whenever a new refusal is kept."""
        self._learnt = learnt
        self._clock = clock
        self._said: dict[str, dict[str, RepeatedRefusal]] = {}
        self._replicas: dict[str, int] = {}
        self._repeated: dict[str, int] = {}

    def standing(self, scope: Scope) -> RepeatedRefusal | None:
        """Return the refusal to answer a request with, and count it as a repeat; None if a replica may have room. None
        also for a page in a browser: it can read only an answer with the CORS headers that a replica adds.
        """
        path = scope["path"]
        if (
            scope["method"] != "POST"
            or path not in self._said
            or any(name == b"origin" for name, _ in scope["headers"])
        ):
            return None
        now = self._clock()
        said = self._said[path] = {replica: one for replica, one in self._said[path].items() if one.until > now}
        if not said or len(said) < self._replicas[path]:
            return None
        self._repeated[path] = self._repeated.get(path, 0) + 1
        return max(said.values(), key=lambda one: one.until)

    def passing(self, scope: Scope) -> Scope:
        """Return the scope of a request to pass on, with `REPEATED` of the proxy, and without one of the client."""
        headers = [pair for pair in scope["headers"] if pair[0].lower() != REPEATED]
        if scope["method"] == "POST" and (repeated := self._repeated.pop(scope["path"], 0)):
            headers.append((REPEATED, str(repeated).encode()))
        return {**scope, "headers": headers}

    def learning(self, scope: Scope, send: Send) -> Send:
        """Return a `send` for a request that is passed on: it keeps a full replica's refusal and removes `FULL`."""
        sign: bytes | None = None
        headers: list[tuple[bytes, bytes]] = []
        body = b""

        async def learn(message: Message) -> None:
            nonlocal sign, headers, body
            if message["type"] == "http.response.start":
                sign = next((value for name, value in message["headers"] if name.lower() == FULL), None)
                if sign is not None:
                    headers = [pair for pair in message["headers"] if pair[0].lower() != FULL]
                    message = {**message, "headers": headers}
            elif sign is not None and message["type"] == "http.response.body":
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    self._keep(scope["path"], sign, headers, body)
            await send(message)

        return learn

    def _keep(self, path: str, sign: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        try:
            replica, replicas, seconds = sign.decode("ascii").split()
            until, count = self._clock() + float(seconds), int(replicas)
        except ValueError:  # a header of another version: the client gets this answer, but it is not repeated
            return
        kept = [pair for pair in headers if pair[0].lower() in KEPT]
        self._said.setdefault(path, {})[replica] = RepeatedRefusal(until, kept, body)
        self._replicas[path] = count
        self._learnt()


class AnnounceRefusals:
    """The replica's half, as ASGI middleware: completes the header `FULL`, and counts the repeats of the proxy."""

    def __init__(self, app: ASGIApp, replica: str, replicas: int | None, count: Callable[[str, int], None]) -> None:
        """`replica` is the id of this replica. `replicas` is None if their number is not fixed or the proxy lacks the
        middleware; then `FULL` is not sent. `count` is called with a path and the number of refusals repeated for it.
        """
        self._app = app
        self._sign = None if replicas is None else f"{replica} {replicas}".encode()
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call and complete its `FULL` header."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        for name, value in scope["headers"] if self._sign is not None else ():
            if name == REPEATED and value.isdigit():
                path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
                self._count(path, int(value))
                fields = {"path": path, "refused": int(value)}
                logger.info("the proxy repeated refusals for this replica", extra={"fields": fields})

        async def sign(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0] != FULL]
                if self._sign is not None:
                    headers += [(FULL, self._sign + b" " + value) for name, value in message["headers"] if name == FULL]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, sign)
