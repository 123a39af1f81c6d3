"""The proxy repeats the refusals of full replicas while they are valid, and reports the number of its repeats."""

import asyncio
import itertools
import json
from typing import Any

from cluster.actors.messages import Overloaded
from cluster.api.core.errors import overloaded_error
from cluster.api.proxy.middleware import BufferedRequests, JsonErrors
from cluster.api.proxy.refusals import FULL_HEADER, REPEATS_HEADER, AnnounceRefusals, Refusals, hold_s
from cluster.api.proxy.throttle import MAX_PAUSE_S, CpuLoad, Throttle
from tests.support.simulated_time import SimulatedTimeLoop

START, BODY = "http.response.start", "http.response.body"
WAIT_S = 8.0


class FakeReplica:
    """A fake application behind Serve. It refuses requests while it is full, and counts the requests that reach it."""

    def __init__(self, name: str = "a", replicas: int | None = 1) -> None:
        self.full = self.refuses_every_client = True
        self.request_count = 0
        self.counted_refusals: list[tuple[str, int]] = []
        self.app = AnnounceRefusals(
            self._answer, name, replicas, lambda path, times: self.counted_refusals.append((path, times))
        )

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.request_count += 1
        if self.full:
            await overloaded_error(Overloaded("full", WAIT_S), self.refuses_every_client).response()(
                scope, receive, send
            )
            return
        await send({"type": START, "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": BODY, "body": b"{}"})


class SaturatedCpuLoad(CpuLoad):
    """A machine whose cores are always busy."""

    def saturated(self) -> bool:
        return True


class FakeProxy:
    """A fake of Serve's proxy with Aerie's middlewares. It sends each request to the next of `replicas` in turn."""

    def __init__(self, *replicas: FakeReplica) -> None:
        self.now = 0.0
        turns = itertools.cycle(replicas)

        async def route(scope: Any, receive: Any, send: Any) -> None:
            await next(turns).app(scope, receive, send)

        self._app = BufferedRequests(JsonErrors(route))  # in Serve's order, the last of `middlewares` outermost
        self._app._refusals = Refusals(self._app._throttle.interrupt, lambda: self.now)

    def ask(self, path: str = "/v1/completions", method: str = "POST", headers: Any = ()) -> tuple[int, Any, Any]:
        """Status, headers and body of one answer."""
        return asyncio.run(self.ask_async(path, method, headers))

    async def ask_async(
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
    replica = FakeReplica()
    proxy = FakeProxy(replica)
    answers = [proxy.ask() for _ in range(10)]
    assert all(answer == answers[0] for answer in answers)
    status, headers, body = answers[0]
    assert (status, headers[b"retry-after"], body["error"]["code"]) == (503, b"8", "overloaded")
    assert FULL_HEADER not in headers and replica.request_count == 1
    replica.full = False
    assert proxy.ask()[0] == 503 and replica.request_count == 1
    proxy.now += hold_s(WAIT_S)
    assert proxy.ask()[0] == 200
    assert proxy.ask()[0] == 200
    assert replica.counted_refusals == [("/v1/completions", 10)]


def test_refusal_is_valid_for_a_small_part_of_its_retry_after() -> None:
    assert [hold_s(wait) for wait in (0.0, 2.0, 8.0, 1e4)] == [0.0, 0.1, 0.4, 1.0]


def test_requests_of_other_paths_and_methods_reach_the_replica() -> None:
    replica = FakeReplica()
    proxy = FakeProxy(replica)
    proxy.ask()
    replica.full = False
    assert proxy.ask("/v1/models", "GET")[0] == 200
    assert proxy.ask(method="GET")[0] == 200
    assert proxy.ask("/v1/chat/completions")[0] == 200
    assert proxy.ask("/other/v1/completions")[0] == 200  # another application
    assert proxy.ask()[0] == 503


def test_request_with_origin_header_reaches_the_replica() -> None:
    """The headers of the replica's answer say whether the browser page may read it. Without them the page could not
    tell a repeated refusal from a broken network.
    """
    replica = FakeReplica()
    proxy = FakeProxy(replica)
    proxy.ask()
    assert proxy.ask(headers=[(b"origin", b"https://chat.example")])[0] == 503
    assert replica.request_count == 2
    assert proxy.ask()[0] == 503
    assert replica.request_count == 2


def test_proxy_refuses_only_when_all_replicas_are_full() -> None:
    full, free = FakeReplica("a", 2), FakeReplica("b", 2)
    free.full = False
    proxy = FakeProxy(full, free)
    assert [proxy.ask()[0] for _ in range(6)] == [503, 200] * 3
    assert (full.request_count, free.request_count) == (3, 3)
    free.full = True
    assert [proxy.ask()[0] for _ in range(6)] == [503] * 6
    assert (full.request_count, free.request_count) == (4, 4)


def test_refusal_of_a_single_request_is_not_repeated() -> None:
    """For example, the request has too many tokens for the rest of the queue; a shorter request may be admitted."""
    replica = FakeReplica()
    replica.refuses_every_client = False
    proxy = FakeProxy(replica)
    assert (proxy.ask()[0], proxy.ask()[0], replica.request_count) == (503, 503, 2)


def test_refusals_are_not_repeated_with_autoscaled_replicas() -> None:
    replica = FakeReplica(replicas=None)
    proxy = FakeProxy(replica)
    for expected_count in (1, 2, 3):
        status, headers, body = proxy.ask()
        assert (status, body["error"]["code"], replica.request_count) == (503, "overloaded", expected_count)
        assert FULL_HEADER not in headers


def test_malformed_full_header_is_ignored() -> None:
    """For example, a replica of another version sends it. The answer still reaches the client."""
    replica = FakeReplica()
    proxy = FakeProxy(replica)
    for announcement in (b"", b"0.4", b"a b c", b"a 1 0.4 more", b"\xff 1 0.4"):
        replica.app._announcement = announcement  # the answer appends the seconds to it
        assert proxy.ask()[0] == 503
    assert replica.request_count == 5


def test_repeats_header_of_a_client_is_ignored() -> None:
    replica = FakeReplica()
    replica.full = False
    proxy = FakeProxy(replica)
    for name in (REPEATS_HEADER, REPEATS_HEADER.title()):
        assert proxy.ask(headers=[(name, b"1000")])[0] == 200
    assert replica.counted_refusals == []


def test_refusal_answers_requests_that_wait_in_the_throttle() -> None:
    """On a saturated machine requests begin one after another. Five requests come at once: the first is refused because
    the replica is full, and the other three of its path get that refusal at once. The one of another path waits on.
    """
    replica = FakeReplica()
    proxy = FakeProxy(replica)
    proxy._app._throttle = Throttle(SaturatedCpuLoad())
    proxy._app._refusals = Refusals(proxy._app._throttle.interrupt)

    async def all_ask() -> list[tuple[int, float]]:
        clock = asyncio.get_running_loop().time
        start_time = clock()

        async def timed_ask(path: str) -> tuple[int, float]:
            status, _, _ = await proxy.ask_async(path, body=bytes(1 << 20))  # has the longest pause
            return status, clock() - start_time

        return await asyncio.gather(*(timed_ask(path) for path in ["/v1/completions"] * 4 + ["/other"]))

    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        *same, other = runner.run(all_ask())
    assert [status for status, _ in same] == [503] * 4 and other[0] == 503
    assert max(seconds for _, seconds in same) < 0.5 * MAX_PAUSE_S < other[1]
    assert replica.request_count == 2
