"""The access log has one line per call and none per probe; a metric counts answers by route and status."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cluster.api.http import openapi
from cluster.api.http.middleware import Drain
from cluster.api.http.routes import make_app
from cluster.observability import metrics
from cluster.observability.logs import TextLines, request_id
from cluster.request import Request, SequenceOutput
from tests.serving.api.scripted import MODEL, Client, ScriptedService
from tests.serving.api.test_streams import AsgiClient, wait_until


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """A function that returns the fields of the access lines so far; its key `task` holds method and path."""
    caplog.set_level(logging.INFO, "cluster.api.http.access_log")
    return lambda: [
        {"call": record.getMessage(), **record.__dict__["fields"]}
        for record in caplog.records
        if record.name == "cluster.api.http.access_log"
    ]


def response_counts(service: ScriptedService) -> dict[tuple[str, str], float]:
    """How many answers the metric has counted so far, by route and status, without zeros."""
    (family,) = [f for f in service.metrics.registry.collect() if f.name == "aerie_http_responses"]
    return {
        (s.labels["route"], s.labels["status"]): s.value
        for s in family.samples
        if s.name.endswith("_total") and s.value
    }


@pytest.mark.parametrize("stream", [False, True])
def test_access_log_line_holds_status_outcome_token_counts_and_times(client: Client, lines: Any, stream: bool) -> None:
    assert client.complete(stream=stream, n=2, max_tokens=7, ignore_eos=True).status_code == 200
    (line,) = lines()
    assert line["call"] == "POST /v1/completions"
    assert (line["status"], line["outcome"]) == (200, "ok")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (5, 14), "two samples share one prompt"
    assert 0 <= line["first_token_s"] <= line["total_s"]


def test_access_log_record_carries_the_request_id(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    logged_ids = []
    caplog.handler.setFormatter(TextLines())
    caplog.set_level(logging.INFO, "cluster")
    caplog.handler.addFilter(lambda record: not logged_ids.append((record.name, request_id.get())))
    answer = client.complete().json()
    assert ("cluster.api.http.access_log", answer["id"]) in logged_ids
    assert request_id.get() == ""


def test_refused_and_failed_calls_are_logged_and_counted_by_status(
    client: Client, service: ScriptedService, lines: Any
) -> None:
    client.complete(n=200)
    client.get("/nothing/of/ours")
    service.engine.queue_is_full = True
    client.complete()
    service.engine.queue_is_full = False
    service.engine.fail_at = 0
    client.complete()
    service.engine.fail_at = 5
    client.complete(stream=True, max_tokens=40)
    logged_calls = [(line["call"], line["status"], line["outcome"]) for line in lines()]
    assert logged_calls == [
        ("POST /v1/completions", 400, "refused"),
        ("GET /nothing/of/ours", 404, "refused"),
        ("POST /v1/completions", 503, "refused"),
        ("POST /v1/completions", 500, "error"),
        ("POST /v1/completions", 200, "error"),
    ]
    generation = "/v1/completions"
    assert response_counts(service) == {
        (generation, "400"): 1,
        ("other", "404"): 1,
        (generation, "503"): 1,
        (generation, "500"): 1,
        (generation, "200"): 1,
    }


@pytest.mark.parametrize(("stream", "at", "status"), [(False, 0, 503), (False, 5, 503), (True, 0, 503), (True, 5, 200)])
def test_call_aborted_by_the_engine_is_logged_as_an_error(
    client: Client, service: ScriptedService, lines: Any, stream: bool, at: int, status: int
) -> None:
    service.engine.fail_at = at
    service.engine.failure = SequenceOutput("r", (), finish_reason="abort", error="rank 1 died")
    client.complete(stream=stream, max_tokens=40)
    (line,) = lines()
    assert (line["status"], line["outcome"]) == (status, "error")


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_is_logged_as_gone_and_not_as_an_error(
    app: FastAPI, service: ScriptedService, lines: Any, stream: bool
) -> None:
    async def scenario() -> None:
        service.engine.step_s = 0.002
        asgi_client = AsgiClient(app, {"stream": stream, "max_tokens": 400, "ignore_eos": True})
        await wait_until(lambda: service.engine.running and (len(asgi_client.sent_messages) > 3 or not stream))
        asgi_client.disconnected.set()
        await asyncio.wait_for(asgi_client.task, 20)

    asyncio.run(scenario())
    (line,) = lines()
    assert line["outcome"] == "gone"
    assert line["status"] == (200 if stream else 499)


def test_metric_statuses_include_every_openapi_status() -> None:
    assert {int(status) for status in openapi.STATUSES} <= set(metrics.STATUSES)


def test_probes_are_counted_and_not_logged(client: Client, service: ScriptedService, lines: Any) -> None:
    client.get("/health")
    client.get("/metrics")
    assert lines() == []
    assert response_counts(service) == {("/health", "200"): 1, ("/metrics", "200"): 1}


def test_draining_replica_refuses_new_calls_and_finishes_open_calls(service: ScriptedService, lines: Any) -> None:
    drain = Drain()
    app = make_app(service, drain=drain)

    async def scenario() -> list[httpx.Response]:
        service.engine.step_s = 0.002
        asgi_client = AsgiClient(app, {"stream": True, "max_tokens": 100, "ignore_eos": True})
        await wait_until(lambda: len(asgi_client.sent_messages) > 3)
        assert (drain.begin(), drain.begin()) == (1, 1)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
            answers = [
                await http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}),
                await http.post("/v1/chat/completions", json={}),
                await http.get("/ready"),
                await http.get("/health"),
            ]
        assert drain.open_calls == 1
        await asyncio.wait_for(asgi_client.task, 30)
        assert b"".join(message.get("body", b"") for message in asgi_client.sent_messages).endswith(b"data: [DONE]\n\n")
        assert drain.open_calls == 0
        return answers

    answers = asyncio.run(scenario())
    assert [answer.status_code for answer in answers] == [503, 503, 503, 200]
    for refusal in answers[:3]:
        assert refusal.json()["error"]["code"] == "shutting_down"
        assert int(refusal.headers["retry-after"]) > 0
    assert [line["outcome"] for line in lines() if line["call"].startswith("POST")] == ["refused", "refused", "ok"]


def test_call_aborted_by_a_server_shutdown_ends_with_an_error(client: Client, service: ScriptedService) -> None:
    """The engine's stream ends with an abort, as `Router.end_streams` ends it when a server shuts down."""

    async def generate_and_abort(request: Request) -> AsyncIterator[SequenceOutput]:
        yield SequenceOutput(request.request_id, (97,))
        yield SequenceOutput(request.request_id, (), finish_reason="abort", error="the server is shutting down")

    service.engine.generate = generate_and_abort  # type: ignore[method-assign]
    stream = client.complete(stream=True)
    assert stream.status_code == 200
    assert (
        "it may be shutting down"
        in json.loads(stream.text.split("\n\n")[-2].removeprefix("data: "))["error"]["message"]
    )
    assert client.complete().status_code == 503
