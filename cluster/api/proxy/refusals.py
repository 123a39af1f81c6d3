"""Refusals that the proxy repeats: a full replica says for how long it stays full, and gets no request until then.

A refusal costs a replica and the proxy some 10 ms of work together, which the ranks of open streams lack under load;
the proxy alone repeats one in 1 ms. A full replica adds the header `FULL` to its 503: its id, the number of replicas,
and for how many seconds the refusal holds. While the refusals of all replicas hold, the proxy repeats the latest one to
expire. The next request that it passes on carries the number of repeats in the header `REPEATED`, for the metrics.

Nothing heavy is imported here: one half runs in the proxy.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

FULL = b"x-aerie-full"
REPEATED = b"x-aerie-repeated-refusals"
HELD_SHARE, HELD_S = 0.05, 1.0  # a refusal holds for this share of the wait it announces, at most HELD_S
KEPT = frozenset({b"content-type", b"content-length", b"retry-after"})  # headers that are the same in every repeat


def held_s(wait_s: float) -> float:
    """For how many seconds a refusal holds where a new request would wait `wait_s`."""
    return min(HELD_SHARE * wait_s, HELD_S)


@dataclass(frozen=True, slots=True)
class RepeatedRefusal:
    """What one replica answered, and until when that holds."""

    until: float
    headers: list[tuple[bytes, bytes]]
    body: bytes

    async def send(self, send: Send) -> None:
        """Answer a request with it."""
        await send({"type": "http.response.start", "status": 503, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


class Refusals:
    """The proxy's half: the refusals of full replicas, by the path of the request."""

    def __init__(self, learnt: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`learnt` is called whenever a refusal begins to hold."""
        self._learnt = learnt
        self._clock = clock
        self._said: dict[str, dict[str, RepeatedRefusal]] = {}
        self._replicas: dict[str, int] = {}
        self._repeated: dict[str, int] = {}

    def standing(self, scope: Scope) -> RepeatedRefusal | None:
        """The refusal to answer with, counted as a repeat; None where a replica may have room, and for pages in a
        browser, which may read no answer without the headers that a replica gives it.
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
        """The scope of a request that is passed on, with `REPEATED` set by the proxy alone, never by the client."""
        headers = [pair for pair in scope["headers"] if pair[0].lower() != REPEATED]
        if scope["method"] == "POST" and (repeated := self._repeated.pop(scope["path"], 0)):
            headers.append((REPEATED, str(repeated).encode()))
        return {**scope, "headers": headers}

    def learning(self, scope: Scope, send: Send) -> Send:
        """The `send` of a request that is passed on: keeps a full replica's refusal, hides `FULL` from the client."""
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
        except ValueError:  # a header of another version: the client gets the answer, and it is not repeated
            return
        kept = [pair for pair in headers if pair[0].lower() in KEPT]
        self._said.setdefault(path, {})[replica] = RepeatedRefusal(until, kept, body)
        self._replicas[path] = count
        self._learnt()


class AnnounceRefusals:
    """The replica's half, as ASGI middleware: completes the header `FULL`, and counts what the proxy repeated."""

    def __init__(self, app: ASGIApp, replica: str, replicas: int | None, count: Callable[[str, int], None]) -> None:
        """`replicas` None: their number is not fixed, or the proxy lacks the middleware; `FULL` is not sent. `count` is
        given the path and the number of refusals that were repeated for it.
        """
        self._app = app
        self._sign = None if replicas is None else f"{replica} {replicas}".encode()
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
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
