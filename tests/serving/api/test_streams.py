"""Calls that end early: full queue, failing engine, client disconnect. No request keeps running after its call."""

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI

from cluster.actors.messages import Unavailable
from cluster.request import SequenceOutput
from tests.serving.api.scripted import MODEL, Client, ScriptedService, http_scope

LONG_OUTPUT = {"max_tokens": 400, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_full_queue_gives_a_503_with_retry_after(
    client: Client, service: ScriptedService, stream: bool, n: int
) -> None:
    service.engine.queue_is_full = True
    response = client.complete(stream=stream, n=n)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "overloaded"
    assert not service.engine.running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "param"),
    [
        ("the prompt needs 900 slots, the pool has 800", None),
        ("routed_dp_rank: must lie in [0, 1], got 9", "routed_dp_rank"),
    ],
)
def test_request_refused_by_the_engine_gives_a_400(
    client: Client, service: ScriptedService, refusal: str, param: str | None, stream: bool
) -> None:
    service.engine.refusal = refusal
    response = client.complete(routed_dp_rank=9, stream=stream)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["message"]) == (param, refusal)


LOST_ENGINE = SequenceOutput("r", (), finish_reason="abort", error="/secret/path.py: rank 1 died")


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("failure", "retry_after"),
    [(Unavailable("rank 1 died (given up)", 12.2), "13"), (LOST_ENGINE, "5")],
    ids=["unavailable before the request", "aborted during the request"],
)
def test_lost_or_stopping_engine_gives_a_503_with_retry_after(
    client: Client, service: ScriptedService, failure: Any, retry_after: str, n: int
) -> None:
    service.engine.fail_at, service.engine.failure = 0, failure
    for stream in (False, True):
        response = client.complete(stream=stream, n=n)
        assert (response.status_code, response.headers["retry-after"]) == (503, retry_after)
        assert response.json()["error"]["code"] == "engine_unhealthy"
        assert "secret" not in response.text
    service.engine.fail_at, service.engine.failure = 5, LOST_ENGINE
    *_, event, _ = client.chat(stream=True, max_tokens=40).text.split("\n\n")
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "engine_unhealthy"


@pytest.mark.parametrize("failure", [None, RuntimeError("/secret/path.py broke")])
@pytest.mark.parametrize("n", [1, 2])
def test_engine_failure_before_the_first_token_gives_a_500(
    client: Client, service: ScriptedService, failure: Any, n: int
) -> None:
    service.engine.fail_at, service.engine.failure = 0, failure
    for stream in (False, True):
        response = client.complete(stream=stream, n=n)
        assert response.status_code == 500
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert "secret" not in response.text
    assert not service.engine.running
    assert set(service.outcomes()) == {"error"}


@pytest.mark.parametrize("failure", [None, RuntimeError("/secret/path.py broke")])
def test_engine_failure_in_mid_stream_sends_an_error_event(
    client: Client, service: ScriptedService, failure: Any
) -> None:
    service.engine.fail_at, service.engine.failure = 5, failure
    response = client.chat(stream=True, max_tokens=40)
    assert response.status_code == 200
    *chunks, error, rest = response.text.split("\n\n")
    assert rest == ""
    assert json.loads(chunks[-1].removeprefix("data: "))["choices"][0]["delta"]["content"]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "[DONE]" not in response.text


def test_one_failing_sample_ends_the_call(client: Client, service: ScriptedService) -> None:
    service.engine.fail_at = 5
    assert client.complete(n=4, max_tokens=100).status_code == 500
    assert not service.engine.running


class AsgiClient:
    """A client that calls an app over ASGI. It can disconnect at any time, or block in the app's sends."""

    def __init__(self, app: FastAPI, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self.sent_messages: list[dict[str, Any]] = []
        self.disconnected = asyncio.Event()
        self.blocks_sends = False
        self._body = json.dumps({"model": MODEL, "prompt": "hello", **body}).encode()
        self._body_received = False
        self.task = asyncio.create_task(app(http_scope(path), self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._body_received:
            self._body_received = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent_messages.append(message)
        if self.blocks_sends:
            await asyncio.sleep(60)


async def wait_until(condition: Any) -> None:
    """Wait until the condition is true; fail after 30 s."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    "when", ["before the first token", "in mid stream", "while a send is stuck", "without a stream"]
)
@pytest.mark.parametrize("n", [1, 3])
def test_client_disconnect_aborts_all_samples_of_its_request(
    app: FastAPI, service: ScriptedService, when: str, n: int
) -> None:
    async def scenario() -> None:
        service.engine.step_s = 30.0 if when == "before the first token" else 0.002
        asgi_client = AsgiClient(app, {"stream": when != "without a stream", "n": n, **LONG_OUTPUT})
        asgi_client.blocks_sends = when == "while a send is stuck"
        await wait_until(lambda: len(service.engine.running) == n)
        if when in ("in mid stream", "while a send is stuck"):
            await wait_until(lambda: len(asgi_client.sent_messages) > (0 if asgi_client.blocks_sends else 3))
        assert len(service.engine.running) == n
        asgi_client.disconnected.set()
        await asyncio.wait_for(asgi_client.task, 20)
        assert not service.engine.running
        assert len(service.engine.aborted) == n

    asyncio.run(scenario())
    assert service.outcomes() == {"abort": float(n)}


def test_cancelled_call_task_aborts_its_request(app: FastAPI, service: ScriptedService) -> None:
    async def scenario() -> None:
        service.engine.step_s = 0.002
        for stream in (False, True):
            asgi_client = AsgiClient(app, {"stream": stream, **LONG_OUTPUT})
            await wait_until(lambda: len(service.engine.running) == 1)
            asgi_client.task.cancel()
            await asyncio.gather(asgi_client.task, return_exceptions=True)
            assert not service.engine.running

    asyncio.run(scenario())


def test_random_disconnects_of_200_clients_leave_no_running_request(app: FastAPI, service: ScriptedService) -> None:
    async def scenario() -> None:
        service.engine.step_s = 0.001
        asgi_clients = []
        for at in range(200):
            asgi_clients.append(AsgiClient(app, {"stream": at % 3 > 0, "n": 1 + at % 2, **LONG_OUTPUT}))
            asyncio.get_running_loop().call_later(0.0007 * (at * 37 % 101), asgi_clients[-1].disconnected.set)
        await asyncio.wait_for(asyncio.gather(*(asgi_client.task for asgi_client in asgi_clients)), 60)
        assert not service.engine.running

    asyncio.run(scenario())
    assert sum(service.outcomes().values()) == len(service.engine.requests)


def test_stream_sends_its_first_chunk_before_the_engine_finishes(app: FastAPI, service: ScriptedService) -> None:
    async def scenario() -> None:
        service.engine.step_s = 0.2
        asgi_client = AsgiClient(app, {"stream": True, "max_tokens": 5})
        await wait_until(lambda: len(asgi_client.sent_messages) == 2)
        assert asgi_client.sent_messages[1]["body"].startswith(b"data: ")
        assert service.engine.running
        asgi_client.disconnected.set()
        await asgi_client.task

    asyncio.run(scenario())
