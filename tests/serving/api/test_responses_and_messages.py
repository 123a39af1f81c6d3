"""/v1/responses and /v1/messages over HTTP: bad bodies, ends and errors of streams, disconnects, error formats."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fastapi import FastAPI

from cluster.api.core.errors import ApiError
from cluster.api.core.fields import WARNING_HEADER
from cluster.api.http.middleware import Drain, envelope_of
from cluster.api.http.routes import make_app
from tests.serving.api.bad_items import HI, MESSAGES, OF_MESSAGES, OF_RESPONSES, RESPONSES
from tests.serving.api.scripted import MODEL, Client, ScriptedService
from tests.serving.api.test_access import response_counts
from tests.serving.api.test_auth import ANN, KEYS
from tests.serving.api.test_streams import AsgiClient, wait_until

GOOD: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": MODEL, "input": "hi"},
    MESSAGES: {"model": MODEL, "messages": HI, "max_tokens": 64},
}
LENGTH_FIELDS = {RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
COUNT_PATHS = {RESPONSES: f"{RESPONSES}/input_tokens", MESSAGES: f"{MESSAGES}/count_tokens"}
BAD_TABLES = {RESPONSES: OF_RESPONSES, MESSAGES: OF_MESSAGES}
BAD_CASES = [(path, name) for path, table in BAD_TABLES.items() for name in table]
# The bad bodies that the JSON schema of each route accepts. A schema cannot express their rules: these depend on
# another field's value, on the model's context length, on single characters, or on JSON inside a text.
ACCEPTED_BY_SCHEMA = {
    RESPONSES: {
        "input with half a surrogate pair", "input longer than the context", "the template refuses",
        "call arguments are no JSON", "a call output without call_id", "max_output_tokens is huge",
        "a custom tool's grammar without a definition", "two tools of a namespace with the same name",
        "a tool name with a space", "two tools with the same name", "tool parameters of type array",
        "half a surrogate pair in a tool", "tool_choice without tools", "tool_choice of an unknown tool",
        "tool_choice is required with only hosted tools", "tool_choice that fits two namespaces",
        "an unknown format type", "a format without a schema", "a schema with an unknown type",
        "top_logprobs without include", "stream options without a stream", "two formats",
    },
    MESSAGES: {
        "messages longer than the context", "the template refuses", "max_tokens is huge", "half a surrogate pair",
        "a tool_use block of the user", "a tool_result block of the assistant",
        "a tool_result block without tool_use_id", "the last message ends with a tool_use block",
        "an empty stop sequence", "too many stop sequences", "tool_choice of a hosted tool",
        "input_schema of type array", "a tool name with a space", "tool_choice without a name",
        "tool_choice of an unknown tool", "tool_choice without tools", "a schema with an unknown type",
    },
}  # fmt: skip


def named_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The (event name, data) pairs of an event stream whose events have names."""
    named_pairs = []
    *events, rest = text.split("\n\n")
    assert rest == ""
    for event in events:
        name, data = event.split("\n")
        named_pairs.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return named_pairs


def answer_text(path: str, body: dict[str, Any]) -> str:
    """The text of a complete answer of /v1/messages or /v1/responses."""
    if path == MESSAGES:
        return "".join(block["text"] for block in body["content"])
    return "".join(part["text"] for item in body["output"] for part in item["content"])


@pytest.fixture(scope="module")
def shared_client(tokenizer_folder: Path) -> Iterator[Client]:
    """A client of one server for all bad bodies. After the tests the server must still answer valid requests."""
    service = ScriptedService(tokenizer_folder)
    client = Client(make_app(service))
    yield client
    assert service.engine.requests == [], "a bad request reached the engine"
    for path, good in GOOD.items():
        assert client.post(path, good).status_code == 200


@pytest.fixture(scope="module")
def document(shared_client: Client) -> dict[str, Any]:
    document_dict: dict[str, Any] = shared_client.get("/openapi.json").json()
    return document_dict


@pytest.mark.parametrize(("path", "name"), BAD_CASES, ids=[f"{path} {name}" for path, name in BAD_CASES])
def test_bad_field_gives_a_400_that_names_the_field(shared_client: Client, path: str, name: str) -> None:
    fields, param, message_part = BAD_TABLES[path][name]
    body = json.dumps({**GOOD[path], **fields})  # ASCII, so that surrogates travel as escapes
    response = shared_client.request("POST", path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{param}: "), error
    assert message_part in error["message"] and len(error["message"]) < 400
    if path == RESPONSES:
        assert error["param"] == param and error["code"]


@pytest.mark.parametrize("path", GOOD)
def test_openapi_schema_rejects_the_bad_bodies_of_the_route(document: dict[str, Any], path: str) -> None:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema_validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    assert schema_validator.is_valid(GOOD[path])
    bad_bodies = {name: {**GOOD[path], **case[0]} for name, case in BAD_TABLES[path].items()}
    accepted = {name for name, body in bad_bodies.items() if schema_validator.is_valid(json.loads(json.dumps(body)))}
    assert accepted == ACCEPTED_BY_SCHEMA[path]


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [(b"{", 400, "invalid_request_error"), (b" " * (1 << 20 | 1), 413, "request_too_large")],
)
def test_invalid_json_gives_a_400_and_an_oversized_body_a_413(
    shared_client: Client, path: str, content: bytes, status: int, kind: str
) -> None:
    for route in (path, COUNT_PATHS[path]):
        response = shared_client.request("POST", route, content=content, headers={"content-type": "application/json"})
        assert response.status_code == status
        assert response.json()["error"]["type"] == (kind if path == MESSAGES else "invalid_request_error")


@pytest.mark.parametrize("path", GOOD)
def test_error_bodies_match_the_openapi_schema_of_the_route(
    shared_client: Client, document: dict[str, Any], path: str
) -> None:
    answers = [
        (path, "post", shared_client.post(path, {**GOOD[path], "model": "other"})),
        (path, "post", shared_client.post(path, {})),
        (COUNT_PATHS[path], "post", shared_client.post(COUNT_PATHS[path], {})),
    ]
    assert [answer.status_code for _, _, answer in answers] == [404, 400, 400]
    for route, method, answer in answers:
        response_document = document["paths"][route][method]["responses"][str(answer.status_code)]
        schema = {**response_document["content"]["application/json"]["schema"], "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(answer.json())
    assert "text/event-stream" in document["paths"][path]["post"]["responses"]["200"]["content"]


def test_stored_response_routes_give_a_404_because_nothing_is_stored(shared_client: Client) -> None:
    for method, path in (("GET", "x"), ("DELETE", "resp_1"), ("POST", "resp_1/cancel"), ("GET", "resp_1/input_items")):
        answer = shared_client.request(method, f"{RESPONSES}/{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].startswith(f"there is no response '{path}': this server stores none")
    assert shared_client.get(RESPONSES).status_code == 405
    wrong = [shared_client.get(MESSAGES), shared_client.post(f"{MESSAGES}/batches", {})]
    assert [answer.status_code for answer in wrong] == [405, 404]
    assert [answer.json()["error"]["type"] for answer in wrong] == ["invalid_request_error", "not_found_error"]


def test_token_count_routes_match_the_usage_and_the_tokenize_route(shared_client: Client, client: Client) -> None:
    """The count route, the answer's usage and /tokenize give the same number."""
    for path, good in GOOD.items():
        for fields in ({}, {"instructions" if path == RESPONSES else "system": "be brief"}):
            token_count = shared_client.post(COUNT_PATHS[path], {**good, **fields}).json()["input_tokens"]
            usage = client.post(path, {**good, **fields}).json()["usage"]
            assert token_count == usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
            messages = [{"role": "system", "content": text} for text in fields.values()] + HI
            body = {"messages": messages, "add_special_tokens": False}
            assert shared_client.post("/tokenize", body).json()["count"] == token_count


@pytest.mark.parametrize("path", GOOD)
def test_unknown_fields_are_named_in_a_header(client: Client, path: str) -> None:
    answer = client.post(path, {**GOOD[path], "unheard_of": 1, "metadata": {}})
    assert answer.status_code == 200
    assert answer.headers[WARNING_HEADER] == "unknown field 'unheard_of' ignored"
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    if path == MESSAGES:
        headers = client.post(path, {**GOOD[path], **thinking}).headers
        assert headers[WARNING_HEADER] == "thinking is not known of this model"
        assert headers["request-id"].startswith("msg_")


@pytest.mark.parametrize("path", GOOD)
def test_streamed_text_equals_the_complete_answer(client: Client, service: ScriptedService, path: str) -> None:
    service.engine.script = "so 😀 it\nis".encode()
    stop = {RESPONSES: {"stop": ["\nis"]}, MESSAGES: {"stop_sequences": ["\nis"]}}
    for fields, text in (({}, "so 😀 it\nis"), (stop[path], "so 😀 it")):
        complete_answer = client.post(path, {**GOOD[path], **fields}).json()
        assert answer_text(path, complete_answer) == text
        answer = client.post(path, {**GOOD[path], **fields, "stream": True})
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = named_events(answer.text)
        assert all(name == data["type"] for name, data in events)
        deltas = [data["delta"] for name, data in events if name.endswith(("text.delta", "block_delta"))]
        assert "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas) == text
        assert events[-1][0] == ("message_stop" if path == MESSAGES else "response.completed")
    if path == MESSAGES:
        assert (complete_answer["stop_reason"], complete_answer["stop_sequence"]) == ("stop_sequence", "\nis")


def test_responses_api_logprobs_equal_chat_logprobs(client: Client, service: ScriptedService) -> None:
    service.engine.script = "aé".encode()
    body = {**GOOD[RESPONSES], "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [part] = client.post(RESPONSES, body).json()["output"][0]["content"]
    chat = client.chat(logprobs=True, top_logprobs=2).json()["choices"][0]
    assert part["logprobs"] == chat["logprobs"]["content"]
    assert [entry["bytes"] for entry in part["logprobs"]] == [[97], [0xC3], [0xA9], [*b"<eos>"]]
    events = named_events(client.post(RESPONSES, {**body, "stream": True}).text)
    deltas = [entry for name, data in events if name == "response.output_text.delta" for entry in data["logprobs"]]
    [done] = [data["logprobs"] for name, data in events if name == "response.output_text.done"]
    assert deltas == done == part["logprobs"]
    [plain] = client.post(RESPONSES, GOOD[RESPONSES]).json()["output"][0]["content"]
    assert plain["logprobs"] == []


@pytest.mark.parametrize("path", GOOD)
def test_failure_in_mid_stream_sends_the_error_events_of_the_api(
    client: Client, service: ScriptedService, path: str
) -> None:
    service.engine.fail_at = 5
    events = named_events(client.post(path, {**GOOD[path], "stream": True}).text)
    if path == MESSAGES:
        assert events[-1][1]["error"]["type"] == "api_error"
        assert [name for name, _ in events].count("error") == 1
    else:
        assert [name for name, _ in events[-2:]] == ["error", "response.failed"]
        assert events[-1][1]["response"]["status"] == "failed"
    assert "secret" not in str(events)
    service.engine.fail_at = 0
    answer = client.post(path, {**GOOD[path], "stream": True})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == ("api_error" if path == MESSAGES else "server_error")


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("stream", [False, True])
def test_engine_refusals_use_the_error_format_of_the_api(
    client: Client, service: ScriptedService, path: str, stream: bool
) -> None:
    body = {**GOOD[path], "stream": stream}
    is_messages = path == MESSAGES
    service.engine.queue_is_full = True
    full_queue = client.post(path, body)
    assert (full_queue.status_code, full_queue.headers["retry-after"]) == (503, "1")
    service.engine.queue_is_full = False
    service.engine.retry_after_s = 4.0
    full_server = client.post(path, body)
    assert (full_server.status_code, full_server.headers["retry-after"]) == (503, "4")
    assert {answer.json()["error"]["type"] for answer in (full_queue, full_server)} == {"overloaded_error"}
    assert all(("type" in answer.json()) == is_messages for answer in (full_queue, full_server))
    service.engine.retry_after_s = 0.0
    service.engine.refusal = "routed_dp_rank: must lie in [0, 0], got 7"
    refused = client.post(path, {**body, "routed_dp_rank": 7})
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, service.engine.refusal)
    service.engine.refusal = "prompt holds too much"
    assert client.post(path, body).json()["error"]["message"] == service.engine.refusal
    assert not service.engine.running


def test_auth_and_drain_errors_use_the_error_format_of_the_path(service: ScriptedService) -> None:
    drain = Drain()
    client = Client(make_app(service, drain=drain, keys=KEYS))
    valid_headers = {"x-api-key": ANN, "anthropic-version": "2023-06-01", "anthropic-beta": "prompt-caching-2024-07-31"}
    for path, body in GOOD.items():
        denied, allowed = client.post(path, body), client.post(path, body, headers=valid_headers)
        assert (denied.status_code, allowed.status_code) == (401, 200)
        kind = "authentication_error" if path == MESSAGES else "invalid_request_error"
        assert denied.json()["error"]["type"] == kind
        assert ("param" in denied.json()["error"]) == (path == RESPONSES)
    assert client.get(f"{MESSAGES}/x", headers={"x-api-key": "wrong"}).json()["error"]["type"] == "authentication_error"
    drain.begin()
    for path, body in GOOD.items():
        refused = client.post(path, body, headers=valid_headers)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert ("type" in refused.json()) == (path == MESSAGES)


@pytest.mark.parametrize(
    ("path", "root", "is_openai_format"),
    [
        ("/v1/messages", "", False),
        ("/v1/messages/count_tokens", "", False),
        ("/two/v1/messages", "/two", False),
        ("/v1/messagesx", "", True),
        ("/v1/responses", "", True),
        ("/x/v1/messages", "", True),
    ],
)
def test_error_format_is_chosen_by_the_path(path: str, root: str, is_openai_format: bool) -> None:
    envelope = envelope_of({"path": path, "root_path": root})
    assert ("param" in envelope(ApiError("no"))["error"]) == is_openai_format


def test_calls_are_logged_and_counted_by_route(
    client: Client, service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cluster.api.http.access_log")
    for path, good in GOOD.items():
        answer = client.post(path, {**good, "ignore_eos": True} | {LENGTH_FIELDS[path]: 5})
        fields = caplog.records[-1].__dict__["fields"]
        assert (fields["status"], fields["outcome"], fields["completion_tokens"]) == (200, "ok", 5)
        assert answer.json()["id"].startswith("resp_" if path == RESPONSES else "msg_")
        client.post(path, {})
        assert client.post(COUNT_PATHS[path], good).status_code == 200
    client.get(f"{RESPONSES}/resp_1")
    routes = [(path, status) for path in GOOD for status in ("200", "400")]
    routes += [(path, "200") for path in COUNT_PATHS.values()] + [(f"{RESPONSES}/{{response_id:path}}", "404")]
    assert response_counts(service) == dict.fromkeys(routes, 1)
    assert service.outcomes() == {"length": 2.0, "invalid": 2.0}


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_aborts_its_request(app: FastAPI, service: ScriptedService, path: str, stream: bool) -> None:
    async def scenario() -> None:
        service.engine.step_s = 0.002
        long = {"ignore_eos": True, "stream": stream, "prompt": None, LENGTH_FIELDS[path]: 400}
        asgi_client = AsgiClient(app, {**GOOD[path], **long}, path)
        await wait_until(lambda: len(service.engine.running) == 1)
        if stream:
            await wait_until(lambda: len(asgi_client.sent_messages) > 3)
        asgi_client.disconnected.set()
        await asyncio.wait_for(asgi_client.task, 20)
        assert not service.engine.running and len(service.engine.aborted) == 1

    asyncio.run(scenario())
    assert service.outcomes() == {"abort": 1.0}
