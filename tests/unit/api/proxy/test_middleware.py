"""A client gets a JSON error where Serve's proxy answers in plain text or does not answer at all."""

import asyncio
import json
from typing import Any

import pytest
import ray.serve._private.proxy as serves_proxy
import uvicorn
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from cluster.api.proxy import middleware, serve_limits
from cluster.api.proxy.connections import Connection
from cluster.api.proxy.middleware import BufferedRequests, JsonErrors, Lingering, middlewares
from cluster.api.proxy.throttle import CpuLoad

START, BODY = "http.response.start", "http.response.body"


def run_json_errors(
    messages: list[dict[str, Any]], headers: Any = (), error: Exception | None = None, **scope: Any
) -> Any:
    """The messages that a client gets when the app sends `messages`, and the request headers that the app gets."""
    sent: list[Any] = []
    app_headers: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        app_headers.extend(scope["headers"])
        for message in messages:
            await send(message)
        if error is not None:
            raise error

    async def send(message: Any) -> None:
        sent.append(message)

    full_scope = {"type": "http", "method": "GET", "path": "/x", "raw_path": b"/x", "headers": list(headers), **scope}
    try:
        asyncio.run(JsonErrors(app)(full_scope, None, send))  # type: ignore[arg-type]
    except Exception as raised:
        assert raised is error
    return sent, app_headers


def envelope(sent: list[Any]) -> Any:
    assert (b"content-type", b"application/json") in sent[0]["headers"]
    error = json.loads(sent[1]["body"])["error"]
    assert {*error} == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("status", "code"), [(404, "not_found"), (408, "request_timeout"), (503, "engine_unhealthy"), (500, "replica_lost")]
)
def test_plain_text_errors_become_json_errors(status: int, code: str) -> None:
    plain = [(b"content-type", b"text/plain; charset=utf-8"), (b"x-request-id", b"abc")]
    sent, _ = run_json_errors(
        [{"type": START, "status": status, "headers": plain}, {"type": BODY, "body": b"Oh no /secret"}]
    )
    assert (sent[0]["status"], len(sent)) == (status, 2)
    assert envelope(sent)["code"] == code
    assert (b"x-request-id", b"abc") in sent[0]["headers"]
    assert ((b"retry-after", b"1") in sent[0]["headers"]) == (status == 503)


@pytest.mark.parametrize(("path", "root"), [("/-/routes", ""), ("/two/-/routes", "/two")])
def test_routes_page_of_serve_is_not_served(path: str, root: str) -> None:
    routes_answer = [{"type": START, "status": 200, "headers": []}, {"type": BODY, "body": b'{"/": "secret"}'}]
    for raw in (path.encode(), path.replace("r", "%72").encode()):  # Serve looks at the decoded path
        sent, _ = run_json_errors(routes_answer, path=path, raw_path=raw, root_path=root)
        assert sent[0]["status"] == 404 and envelope(sent)["code"] == "not_found"
    sent, _ = run_json_errors(routes_answer, path="/-/healthz", raw_path=b"/-/healthz")
    assert sent == routes_answer


def test_successful_and_json_answers_pass_unchanged() -> None:
    for status, kind in ((200, b"text/plain"), (400, b"application/json"), (200, b"text/event-stream")):
        messages = [
            {"type": START, "status": status, "headers": [(b"content-type", kind)]},
            {"type": BODY, "body": b"x", "more_body": True},
            {"type": BODY, "body": b"y"},
        ]
        assert run_json_errors(messages)[0] == messages


def test_missing_answer_becomes_503() -> None:
    sent, _ = run_json_errors([])
    assert (sent[0]["status"], envelope(sent)["code"]) == (503, "replica_lost")
    sent, _ = run_json_errors([], error=RuntimeError("the proxy failed"))
    assert (sent[0]["status"], envelope(sent)["code"]) == (503, "replica_lost")


SHED_STATUSES = (429, 503)
PLAIN = [(b"content-type", b"text/plain; charset=utf-8")]
STREAM = {"type": START, "status": 200, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}


def end_with_error(
    error: Exception, timeout_s: float | None, *messages: dict[str, Any], healthy: bool = True, **scope: Any
) -> Any:
    """The messages that a client gets when Serve's proxy sends `messages` and then ends the call with `error`."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/-/healthz":
            await send({"type": START, "status": 200 if healthy else 503, "headers": PLAIN})
            return
        status = serves_proxy.get_http_response_status(error, timeout_s, "request-1")
        for message in [*messages, *serves_proxy.send_http_response_on_exception(status, bool(messages))]:
            await send(message)

    async def send(message: Any) -> None:
        sent.append(message)

    full_scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/x",
        "headers": [],
        **scope,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serves_proxy, "get_http_response_status", serves_proxy.get_http_response_status)
        serve_limits.patch_proxy()
        asyncio.run(JsonErrors(app)(full_scope, None, send))  # type: ignore[arg-type]
    return sent


def test_serve_timeout_error_names_its_limit_and_is_not_replica_lost() -> None:
    first_chunk = {"type": BODY, "body": b"data: {}\n\n", "more_body": True}
    timeout_header = [(b"x-request-timeout-seconds", b"4")]
    for headers, setting in ([], "http_options.request_timeout_s"), (timeout_header, "x-request-timeout-seconds"):
        sent = end_with_error(TimeoutError(), 4.0, headers=headers)
        assert sent[0]["status"] == 408 and (b"x-should-retry", b"false") in sent[0]["headers"]
        errors = [envelope(sent)]
        stream = end_with_error(TimeoutError(), 4.0, STREAM, first_chunk, headers=headers)
        errors.append(json.loads(stream[-1]["body"].removeprefix(b"data: "))["error"])
        assert not stream[-1].get("more_body")
        for error in errors:
            assert error["code"] == "request_timeout" and "4 s" in error["message"] and setting in error["message"]
    lost_event = end_with_error(RayActorError(), 4.0, STREAM, first_chunk)[-1]["body"]
    assert json.loads(lost_event.removeprefix(b"data: "))["error"]["code"] == "replica_lost"


@pytest.mark.parametrize("status", SHED_STATUSES)
def test_full_serve_queue_is_distinguished_from_missing_replicas(status: int) -> None:
    sent = end_with_error(BackPressureError(7, 7, status, None), None)
    assert sent[0]["status"] == status and (b"retry-after", b"1") in sent[0]["headers"]
    error = envelope(sent)
    assert (error["type"], error["code"]) == ("overloaded_error", "overloaded")
    assert "max_queued_requests" in error["message"]
    assert [b"retry-after", b"9"] in end_with_error(BackPressureError(7, 7, status, 8.5), None)[0]["headers"]
    sent = end_with_error(DeploymentUnavailableError(DeploymentID("x", "y")), None)
    assert (sent[0]["status"], envelope(sent)["code"]) == (503, "engine_unhealthy")


@pytest.mark.parametrize("path", ["/health", "/llm/one/ready"])
def test_shed_health_check_gets_the_status_of_serve_healthz(path: str) -> None:
    for method in ("GET", "HEAD"):
        for status in SHED_STATUSES:
            queue_full_error = BackPressureError(7, 7, status, None)
            sent = end_with_error(queue_full_error, None, path=path, method=method)
            assert sent[0]["status"] == 200 and sent[-1]["body"] == b""
            assert (
                end_with_error(queue_full_error, None, path=path, method=method, healthy=False)[0]["status"] == status
            )
    assert end_with_error(BackPressureError(7, 7, 503, None), None, path=path)[0]["status"] == 503  # a POST
    assert (
        end_with_error(DeploymentUnavailableError(DeploymentID("x", "y")), None, path=path, method="GET")[0]["status"]
        == 503
    )


@pytest.mark.parametrize("path", ["/v1/messages", "/two/v1/messages", "/v1/messages/count_tokens"])
def test_anthropic_routes_get_errors_in_anthropic_format(path: str) -> None:
    """Anthropic's client ignores events without a name: an error without one would look like the end of the answer."""
    sent, _ = run_json_errors(
        [STREAM, {"type": BODY, "body": b"event: ping\ndata: {}\n\n", "more_body": True}], path=path
    )
    name, data, *_ = sent[-1]["body"].split(b"\n")
    assert name == b"event: error"
    lost = json.loads(data.removeprefix(b"data: "))
    assert lost == {"type": "error", "error": {"type": "api_error", "message": middleware.ERROR_BY_STATUS[500][2]}}
    for status, kind in ((404, "not_found_error"), (503, "api_error"), (429, "overloaded_error")):
        sent, _ = run_json_errors(
            [{"type": START, "status": status, "headers": PLAIN}, {"type": BODY, "body": b"no"}], path=path
        )
        assert json.loads(sent[1]["body"])["error"]["type"] == kind


@pytest.mark.parametrize(
    ("name", "value"),
    [(b"x-request-id", b"\xff"), (b"x-request-id", b"a" * 300), (b"serve_multiplexed_model_id", b"\xfe")],
)
def test_header_that_serve_cannot_read_gets_status_400(name: bytes, value: bytes) -> None:
    sent, app_headers = run_json_errors([], headers=[(name, value)])
    assert (sent[0]["status"], envelope(sent)["param"], app_headers) == (400, name.decode(), [])
    assert run_json_errors([], headers=[(name, value)], method="HEAD")[0][1]["body"] == b""


def test_disconnect_disabled_header_of_a_client_is_removed() -> None:
    _, app_headers = run_json_errors([], headers=[(b"x-request-disconnect-disabled", b"?1"), (b"user-agent", b"\xff")])
    assert app_headers == [(b"user-agent", b"\xff")]


def test_middlewares_install_the_connection_class_in_uvicorn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    monkeypatch.setattr(serves_proxy, "get_http_response_status", serves_proxy.get_http_response_status)
    assert [middleware.cls for middleware in middlewares()] == [JsonErrors, BufferedRequests, Lingering]
    config = uvicorn.Config(lambda: None, factory=True, log_config=None)  # as Serve makes it
    config.load()
    assert config.http_protocol_class is Connection


def body_chunk(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def run_buffered(*client_messages: dict[str, Any] | float) -> tuple[list[Any], list[Any]]:
    """The body messages that the app receives, and the messages that the client gets. The client sends
    `client_messages`; a number there is a pause in seconds.
    """
    received_bodies: list[Any] = []
    sent: list[Any] = []

    async def run() -> None:
        remaining_messages = iter(client_messages)

        async def receive() -> Any:
            for message in remaining_messages:
                if not isinstance(message, float):
                    return message
                await asyncio.sleep(message)
            await asyncio.sleep(0.2)
            return {"type": "http.disconnect"}

        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (message := await receive())["type"] != "http.disconnect":
                received_bodies.append((message["body"], message["more_body"]))

        async def send(message: Any) -> None:
            sent.append(message)

        buffered_app = BufferedRequests(app)
        await buffered_app(
            {"type": "http", "method": "POST", "path": "/x", "raw_path": b"/x", "headers": []}, receive, send
        )
        assert buffered_app._buffered_bytes == 0

    asyncio.run(run())
    return received_bodies, sent


def test_request_body_reaches_the_app_as_one_message() -> None:
    assert run_buffered(body_chunk(b"a"), 0.01, body_chunk(b"b"), body_chunk(b"c", False)) == ([(b"abc", False)], [])
    assert run_buffered(body_chunk(b"", False)) == ([(b"", False)], [])


def test_long_request_body_reaches_the_app_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_BUFFERED_BODY", 3)
    client_messages = [body_chunk(b"ab"), body_chunk(b"cd"), body_chunk(b"ef"), body_chunk(b"g", False)]
    assert run_buffered(*client_messages) == ([(b"abcd", True), (b"ef", True), (b"g", False)], [])


def test_disconnect_within_the_body_does_not_call_the_app() -> None:
    assert run_buffered(body_chunk(b"half"), {"type": "http.disconnect"}) == ([], [])


def test_disconnect_before_the_request_begins_does_not_call_the_app() -> None:
    assert run_buffered(body_chunk(b"whole", False), {"type": "http.disconnect"}) == ([], [])


def test_slow_body_gets_status_408_without_calling_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "GRACE_S", 0.02)
    received_bodies, sent = run_buffered(body_chunk(b"a"), 60.0, body_chunk(b"b", False))
    assert received_bodies == [] and sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert envelope(sent)["code"] == "request_timeout"


def test_other_tasks_of_the_loop_run_between_new_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that shares the event loop with 100 new requests runs between any two of them."""
    monkeypatch.setattr(CpuLoad, "saturated", lambda _: False)
    run_order: list[str] = []

    async def run() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            run_order.append("new")

        async def receive() -> Any:
            return body_chunk(b"", False)

        async def stream() -> None:
            while run_order.count("new") < 100:
                run_order.append("old")
                await asyncio.sleep(0)

        buffered_app = BufferedRequests(app)
        scope = {"type": "http", "method": "POST", "path": "/x", "raw_path": b"/x", "headers": []}
        await asyncio.gather(*(buffered_app(scope, receive, receive) for _ in range(100)), stream())  # type: ignore[arg-type]

    asyncio.run(run())
    assert "new,new" not in ",".join(run_order)
