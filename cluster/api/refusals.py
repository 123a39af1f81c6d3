"""Refusals that the proxy repeats: a full replica says for how long it stays full, and is not asked again before.

To refuse costs a replica and the proxy some 10 ms of work together, which a crowd takes from the ranks of open streams;
the proxy alone repeats a refusal in one. A replica that is full adds `FULL` to its 503: who it is, how many replicas
there are, and for how many seconds this holds. While refusals of all of them hold, the proxy answers with the last one;
how many times, the next request that it passes on says in `REPEATED`, so that the replica's metrics count them all.

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
HELD_SHARE, HELD_S = 0.05, 1.0  # for how long a refusal holds: so much of the wait that it tells, at most so long
KEPT = frozenset({b"content-type", b"content-length", b"retry-after"})  # headers that are true of every repetition


def held_s(wait_s: float) -> float:
    """For how many seconds a replica stays full where a newcomer would wait so long."""
    return min(HELD_SHARE * wait_s, HELD_S)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What one replica answered, and until when it stands."""

    until: float
    headers: list[tuple[bytes, bytes]]
    body: bytes

    async def send(self, send: Send) -> None:
        """Answer a request with it."""
        await send({"type": "http.response.start", "status": 503, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


class Refusals:
    """The proxy's half: what full replicas said, by the path that was asked for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, dict[str, Refusal]] = {}
        self._replicas: dict[str, int] = {}
        self._repeated: dict[str, int] = {}

    def standing(self, scope: Scope) -> Refusal | None:
        """The refusal to repeat, which is counted; None where a replica may have room."""
        path = scope["path"]
        if scope["method"] != "POST" or path not in self._said:
            return None
        now = self._clock()
        said = self._said[path] = {replica: one for replica, one in self._said[path].items() if one.until > now}
        if not said or len(said) < self._replicas[path]:
            return None
        self._repeated[path] = self._repeated.get(path, 0) + 1
        return max(said.values(), key=lambda one: one.until)

    def passing(self, scope: Scope) -> Scope:
        """A request that goes on; it carries the count of those that did not, and none that its client made up."""
        headers = [pair for pair in scope["headers"] if pair[0].lower() != REPEATED]
        if scope["method"] == "POST" and (repeated := self._repeated.pop(scope["path"], 0)):
            headers.append((REPEATED, str(repeated).encode()))
        return {**scope, "headers": headers}

    def learning(self, scope: Scope, send: Send) -> Send:
        """`send` for a request that goes on: keeps what a full replica says, and its sign from the client."""
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
        except ValueError:  # not of this version: the client gets its answer, and nothing is repeated
            return
        kept = [pair for pair in headers if pair[0].lower() in KEPT]
        self._said.setdefault(path, {})[replica] = Refusal(until, kept, body)
        self._replicas[path] = count


class TellsProxy:
    """The replica's half, as ASGI middleware: says who is full, and counts what the proxy refused."""

    def __init__(self, app: ASGIApp, replica: str, replicas: int | None, count: Callable[[str, int], None]) -> None:
        """`replicas` None: nobody knows how many there are, or no proxy listens, and nothing is said. `count` is given
        the path and the number of refusals that were repeated for it.
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
