"""The proxy repeats what full replicas said, while it holds, and loses no count of it."""

import asyncio
import itertools
import json
from typing import Any

from cluster.actors.messages import Overloaded
from cluster.api.core.errors import overloaded_error
from cluster.api.proxy.middleware import BufferedRequests, JsonErrors
from cluster.api.proxy.refusals import FULL_HEADER, REPEATS_HEADER, AnnounceRefusals, Refusals, hold_s
from cluster.api.proxy.throttle import MAX_PAUSE_S, CpuLoad, Throttle

START, BODY = "http.response.start", "http.response.body"
WAIT_S = 8.0


class Replica:
    """An application behind Serve: refuses while it is full, and notes what reached it."""

    def __init__(self, name: str = "a", replicas: int | None = 1) -> None:
        self.full = self.whoever = True
        self.asked = 0
        self.counted: list[tuple[str, int]] = []
        self.app = AnnounceRefusals(
            self._answer, name, replicas, lambda path, times: self.counted.append((path, times))
        )

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        if self.full:
            await overloaded_error(Overloaded("full", WAIT_S), self.whoever).response()(scope, receive, send)
            return
        await send({"type": START, "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": BODY, "body": b"{}"})


class Full(CpuLoad):
    """A machine whose cores are always busy."""

    def saturated(self) -> bool:
        return True


class Proxy:
    """Serve's proxy with our middlewares in front of replicas that take turns."""

    def __init__(self, *replicas: Replica) -> None:
        self.now = 0.0
        turns = itertools.cycle(replicas)

        async def route(scope: Any, receive: Any, send: Any) -> None:
            await next(turns).app(scope, receive, send)

        self._app = BufferedRequests(JsonErrors(route))  # in Serve's order, the last of `middlewares` outermost
        self._app._refusals = Refusals(self._app._throttle.interrupt, lambda: self.now)

    def ask(self, path: str = "/v1/completions", method: str = "POST", headers: Any = ()) -> tuple[int, Any, Any]:
        """Status, headers and body of one answer."""
        return asyncio.run(self.asking(path, method, headers))

    async def asking(
        self, path: str, method: str = "POST", headers: Any = (), body: bytes = b"{}"
    ) -> tuple[int, Any, Any]:
        """Status, headers and body of one answer."""
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": list(headers)}
        await self._app(scope, receive, send)  # type: ignore[arg-type]
        return sent[0]["status"], dict(sent[0]["headers"]), json.loads(sent[1]["body"])


def test_refusal_is_repeated_while_valid_and_all_repeats_are_counted() -> None:
    replica = Replica()
    proxy = Proxy(replica)
    answers = [proxy.ask() for _ in range(10)]
    assert all(answer == answers[0] for answer in answers)
    status, headers, body = answers[0]
    assert (status, headers[b"retry-after"], body["error"]["code"]) == (503, b"8", "overloaded")
    assert FULL_HEADER not in headers and replica.asked == 1
    replica.full = False
    assert proxy.ask()[0] == 503 and replica.asked == 1
    proxy.now += hold_s(WAIT_S)
    assert proxy.ask()[0] == 200
    assert proxy.ask()[0] == 200
    assert replica.counted == [("/v1/completions", 10)]


def test_refusal_is_valid_for_a_small_part_of_its_retry_after() -> None:
    assert [hold_s(wait) for wait in (0.0, 2.0, 8.0, 1e4)] == [0.0, 0.1, 0.4, 1.0]


def test_requests_of_other_paths_and_methods_reach_the_replica() -> None:
    replica = Replica()
    proxy = Proxy(replica)
    proxy.ask()
    replica.full = False
    assert proxy.ask("/v1/models", "GET")[0] == 200
    assert proxy.ask(method="GET")[0] == 200
    assert proxy.ask("/v1/chat/completions")[0] == 200
    assert proxy.ask("/other/v1/completions")[0] == 200  # another application
    assert proxy.ask()[0] == 503


def test_request_with_origin_header_reaches_the_replica() -> None:
    """Whose headers say whether the page may read the answer; it could not tell a repeat from a broken network."""
    replica = Replica()
    proxy = Proxy(replica)
    proxy.ask()
    assert proxy.ask(headers=[(b"origin", b"https://chat.example")])[0] == 503
    assert replica.asked == 2
    assert proxy.ask()[0] == 503
    assert replica.asked == 2


def test_proxy_refuses_only_when_all_replicas_are_full() -> None:
    full, free = Replica("a", 2), Replica("b", 2)
    free.full = False
    proxy = Proxy(full, free)
    assert [proxy.ask()[0] for _ in range(6)] == [503, 200] * 3
    assert (full.asked, free.asked) == (3, 3)
    free.full = True
    assert [proxy.ask()[0] for _ in range(6)] == [503] * 6
    assert (full.asked, free.asked) == (4, 4)


def test_refusal_of_a_single_request_is_not_repeated() -> None:
    """Too many tokens for what is left of the queue, say: a shorter request may be let in."""
    replica = Replica()
    replica.whoever = False
    proxy = Proxy(replica)
    assert (proxy.ask()[0], proxy.ask()[0], replica.asked) == (503, 503, 2)


def test_refusals_are_not_repeated_with_autoscaled_replicas() -> None:
    replica = Replica(replicas=None)
    proxy = Proxy(replica)
    for asked in (1, 2, 3):
        status, headers, body = proxy.ask()
        assert (status, body["error"]["code"], replica.asked) == (503, "overloaded", asked)
        assert FULL_HEADER not in headers


def test_malformed_full_header_is_ignored() -> None:
    """Of another version, say: the answer goes to the client all the same."""
    replica = Replica()
    proxy = Proxy(replica)
    for sign in (b"", b"0.4", b"a b c", b"a 1 0.4 more", b"\xff 1 0.4"):
        replica.app._announcement = sign  # before the seconds, which the answer brings
        assert proxy.ask()[0] == 503
    assert replica.asked == 5


def test_repeats_header_of_a_client_is_ignored() -> None:
    replica = Replica()
    replica.full = False
    proxy = Proxy(replica)
    for name in (REPEATS_HEADER, REPEATS_HEADER.title()):
        assert proxy.ask(headers=[(name, b"1000")])[0] == 200
    assert replica.counted == []


def test_refusal_answers_requests_that_wait_in_the_throttle() -> None:
    """On a full machine requests begin one after another; the first of five that come at once learns that the replica
    is full, the others have only to hear it. One of another path waits on.
    """
    replica = Replica()
    proxy = Proxy(replica)
    proxy._app._throttle = Throttle(Full())
    proxy._app._refusals = Refusals(proxy._app._throttle.interrupt)

    async def all_ask() -> list[tuple[int, float]]:
        clock = asyncio.get_running_loop().time
        began = clock()

        async def one(path: str) -> tuple[int, float]:
            status, _, _ = await proxy.asking(path, body=bytes(1 << 20))  # whose rest is the longest
            return status, clock() - began

        return await asyncio.gather(*(one(path) for path in ["/v1/completions"] * 4 + ["/other"]))

    *same, other = asyncio.run(all_ask())
    assert [status for status, _ in same] == [503] * 4 and other[0] == 503
    assert max(seconds for _, seconds in same) < 0.5 * MAX_PAUSE_S < other[1]
    assert replica.asked == 2
