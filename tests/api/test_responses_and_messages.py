"""/v1/responses and /v1/messages over HTTP: bad bodies, ends and errors of streams, clients that leave, envelopes."""

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
from tests.api.bad_items import HI, MESSAGES, OF_MESSAGES, OF_RESPONSES, RESPONSES
from tests.api.scripted import MODEL, Client, ScriptedService
from tests.api.test_access import counted
from tests.api.test_auth import ANN, KEYS
from tests.api.test_streams import Visitor, until

GOOD: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": MODEL, "input": "hi"},
    MESSAGES: {"model": MODEL, "messages": HI, "max_tokens": 64},
}
LENGTHS = {RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
COUNTS = {RESPONSES: f"{RESPONSES}/input_tokens", MESSAGES: f"{MESSAGES}/count_tokens"}
BAD = [(path, name) for path, table in ((RESPONSES, OF_RESPONSES), (MESSAGES, OF_MESSAGES)) for name in table]
# Refused for what a schema cannot say: another field's value, the model's context, characters, JSON inside a text.
BEYOND_A_SCHEMA = {
    "input is half a character", "input beyond the context", "the template refuses", "arguments that are no JSON",
    "a result without a call", "two tools of a name", "parameters that are no object", "half a character in a tool",
    "a choice without tools", "a choice of no tool there is", "a form of another type", "a form without a schema",
    "a schema that is not honoured", "top_logprobs alone", "stream options without a stream", "two forms",
    "max_output_tokens is huge", "messages beyond the context", "max_tokens is huge", "half a character",
    "a use of a tool by the user", "a result by the assistant", "a result without a use", "a use to go on from",
    "a choice among several namespaces", "two tools of a name in a namespace", "a choice of a server's tool",
    "a choice without tools that are called", "a custom tool's empty grammar",
    "an empty stop", "too many stops", "a tool of an array", "a tool's wrong name", "a choice without a name",
}  # fmt: skip


def named(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream that names them."""
    found = []
    *events, rest = text.split("\n\n")
    assert rest == ""
    for one in events:
        name, data = one.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def said(path: str, body: dict[str, Any]) -> str:
    """The text of a whole answer."""
    if path == MESSAGES:
        return "".join(block["text"] for block in body["content"])
    return "".join(part["text"] for item in body["output"] for part in item["content"])


@pytest.fixture(scope="module")
def served(tokenizer_folder: Path) -> Iterator[Client]:
    """One server for the whole table, which has to answer at the end."""
    service = ScriptedService(tokenizer_folder)
    client = Client(make_app(service))
    yield client
    assert service.engine.requests == [], "a bad request reached the engine"
    for path, good in GOOD.items():
        assert client.post(path, good).status_code == 200


@pytest.fixture(scope="module")
def document(served: Client) -> dict[str, Any]:
    found: dict[str, Any] = served.get("/openapi.json").json()
    return found


@pytest.mark.parametrize(("path", "name"), BAD, ids=[f"{path} {name}" for path, name in BAD])
def test_bad_field_gives_a_400_that_names_the_field(
    served: Client, document: dict[str, Any], path: str, name: str
) -> None:
    fields, param, words = (OF_RESPONSES if path == RESPONSES else OF_MESSAGES)[name]
    body = json.dumps({**GOOD[path], **fields})  # ASCII, so that surrogates travel as escapes
    response = served.request("POST", path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{param}: "), error
    assert words in error["message"] and len(error["message"]) < 400
    if path == RESPONSES:
        assert error["param"] == param and error["code"]
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fits = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    assert fits.is_valid(GOOD[path])
    assert name in BEYOND_A_SCHEMA or not fits.is_valid(json.loads(body))


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [(b"{", 400, "invalid_request_error"), (b" " * (1 << 20 | 1), 413, "request_too_large")],
)
def test_invalid_json_gives_a_400_and_an_oversized_body_a_413(
    served: Client, path: str, content: bytes, status: int, kind: str
) -> None:
    for route in (path, COUNTS[path]):
        response = served.request("POST", route, content=content, headers={"content-type": "application/json"})
        assert response.status_code == status
        assert response.json()["error"]["type"] == (kind if path == MESSAGES else "invalid_request_error")


@pytest.mark.parametrize("path", GOOD)
def test_error_bodies_match_the_openapi_schema_of_the_route(
    served: Client, document: dict[str, Any], path: str
) -> None:
    answers = [
        (path, "post", served.post(path, {**GOOD[path], "model": "other"})),
        (path, "post", served.post(path, {})),
        (COUNTS[path], "post", served.post(COUNTS[path], {})),
    ]
    assert [answer.status_code for _, _, answer in answers] == [404, 400, 400]
    for route, method, answer in answers:
        found = document["paths"][route][method]["responses"][str(answer.status_code)]
        schema = {**found["content"]["application/json"]["schema"], "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(answer.json())
    assert "text/event-stream" in document["paths"][path]["post"]["responses"]["200"]["content"]


def test_stored_response_routes_give_a_404_because_nothing_is_stored(served: Client) -> None:
    for method, path in (("GET", "x"), ("DELETE", "resp_1"), ("POST", "resp_1/cancel"), ("GET", "resp_1/input_items")):
        answer = served.request(method, f"{RESPONSES}/{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].startswith(f"there is no response '{path}': this server stores none")
    assert served.get(RESPONSES).status_code == 405
    wrong = [served.get(MESSAGES), served.post(f"{MESSAGES}/batches", {})]
    assert [answer.status_code for answer in wrong] == [405, 404]
    assert [answer.json()["error"]["type"] for answer in wrong] == ["invalid_request_error", "not_found_error"]


def test_token_count_routes_match_the_usage_and_the_tokenize_route(served: Client, client: Client) -> None:
    """By each count, by the answer's usage, and by /tokenize."""
    for path, good in GOOD.items():
        for more in ({}, {"instructions" if path == RESPONSES else "system": "be brief"}):
            counted = served.post(COUNTS[path], {**good, **more}).json()["input_tokens"]
            used = client.post(path, {**good, **more}).json()["usage"]
            assert counted == used["input_tokens"] + used.get("cache_read_input_tokens", 0)
            messages = [{"role": "system", "content": text} for text in more.values()] + HI
            body = {"messages": messages, "add_special_tokens": False}
            assert served.post("/tokenize", body).json()["count"] == counted


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
        whole = client.post(path, {**GOOD[path], **fields}).json()
        assert said(path, whole) == text
        answer = client.post(path, {**GOOD[path], **fields, "stream": True})
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        found = named(answer.text)
        assert all(name == data["type"] for name, data in found)
        deltas = [data["delta"] for name, data in found if name.endswith(("text.delta", "block_delta"))]
        assert "".join(one if isinstance(one, str) else one["text"] for one in deltas) == text
        assert found[-1][0] == ("message_stop" if path == MESSAGES else "response.completed")
    if path == MESSAGES:
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "\nis")


def test_responses_api_logprobs_equal_chat_logprobs(client: Client, service: ScriptedService) -> None:
    service.engine.script = "aé".encode()
    body = {**GOOD[RESPONSES], "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [part] = client.post(RESPONSES, body).json()["output"][0]["content"]
    chat = client.chat(logprobs=True, top_logprobs=2).json()["choices"][0]
    assert part["logprobs"] == chat["logprobs"]["content"]
    assert [one["bytes"] for one in part["logprobs"]] == [[97], [0xC3], [0xA9], [*b"<eos>"]]
    found = named(client.post(RESPONSES, {**body, "stream": True}).text)
    deltas = [one for name, data in found if name == "response.output_text.delta" for one in data["logprobs"]]
    [done] = [data["logprobs"] for name, data in found if name == "response.output_text.done"]
    assert deltas == done == part["logprobs"]
    [plain] = client.post(RESPONSES, GOOD[RESPONSES]).json()["output"][0]["content"]
    assert plain["logprobs"] == []


@pytest.mark.parametrize("path", GOOD)
def test_failure_in_mid_stream_sends_the_error_events_of_the_api(
    client: Client, service: ScriptedService, path: str
) -> None:
    service.engine.fail_at = 5
    found = named(client.post(path, {**GOOD[path], "stream": True}).text)
    if path == MESSAGES:
        assert found[-1][1]["error"]["type"] == "api_error"
        assert [name for name, _ in found].count("error") == 1
    else:
        assert [name for name, _ in found[-2:]] == ["error", "response.failed"]
        assert found[-1][1]["response"]["status"] == "failed"
    assert "secret" not in str(found)
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
    ours = path == MESSAGES
    service.engine.queue_is_full = True
    full = client.post(path, body)
    assert (full.status_code, full.headers["retry-after"]) == (503, "1")
    service.engine.queue_is_full = False
    service.engine.retry_after_s = 4.0
    early = client.post(path, body)
    assert (early.status_code, early.headers["retry-after"]) == (503, "4")
    assert {answer.json()["error"]["type"] for answer in (full, early)} == {"overloaded_error"}
    assert all(("type" in answer.json()) == ours for answer in (full, early))
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
    good = {"x-api-key": ANN, "anthropic-version": "2023-06-01", "anthropic-beta": "prompt-caching-2024-07-31"}
    for path, body in GOOD.items():
        denied, let_in = client.post(path, body), client.post(path, body, headers=good)
        assert (denied.status_code, let_in.status_code) == (401, 200)
        kind = "authentication_error" if path == MESSAGES else "invalid_request_error"
        assert denied.json()["error"]["type"] == kind
        assert ("param" in denied.json()["error"]) == (path == RESPONSES)
    assert client.get(f"{MESSAGES}/x", headers={"x-api-key": "wrong"}).json()["error"]["type"] == "authentication_error"
    drain.begin()
    for path, body in GOOD.items():
        refused = client.post(path, body, headers=good)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert ("type" in refused.json()) == (path == MESSAGES)


@pytest.mark.parametrize(
    ("path", "root", "ours"),
    [
        ("/v1/messages", "", False),
        ("/v1/messages/count_tokens", "", False),
        ("/two/v1/messages", "/two", False),
        ("/v1/messagesx", "", True),
        ("/v1/responses", "", True),
        ("/x/v1/messages", "", True),
    ],
)
def test_error_format_is_chosen_by_the_path(path: str, root: str, ours: bool) -> None:
    envelope = envelope_of({"path": path, "root_path": root})
    assert ("param" in envelope(ApiError("no"))["error"]) == ours


def test_calls_are_logged_and_counted_by_route(
    client: Client, service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cluster.api.http.access_log")
    for path, good in GOOD.items():
        answer = client.post(path, {**good, "ignore_eos": True} | {LENGTHS[path]: 5})
        fields = caplog.records[-1].__dict__["fields"]
        assert (fields["status"], fields["outcome"], fields["completion_tokens"]) == (200, "ok", 5)
        assert answer.json()["id"].startswith("resp_" if path == RESPONSES else "msg_")
        client.post(path, {})
        assert client.post(COUNTS[path], good).status_code == 200
    client.get(f"{RESPONSES}/resp_1")
    routes = [(path, status) for path in GOOD for status in ("200", "400")]
    routes += [(path, "200") for path in COUNTS.values()] + [(f"{RESPONSES}/{{response_id:path}}", "404")]
    assert counted(service) == dict.fromkeys(routes, 1)
    assert service.outcomes() == {"length": 2.0, "invalid": 2.0}


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_aborts_its_request(app: FastAPI, service: ScriptedService, path: str, stream: bool) -> None:
    async def scene() -> None:
        service.engine.step_s = 0.002
        long = {"ignore_eos": True, "stream": stream, "prompt": None, LENGTHS[path]: 400}
        visitor = Visitor(app, {**GOOD[path], **long}, path)
        await until(lambda: len(service.engine.running) == 1)
        if stream:
            await until(lambda: len(visitor.sent) > 3)
        visitor.left.set()
        await asyncio.wait_for(visitor.call, 20)
        assert not service.engine.running and len(service.engine.aborted) == 1

    asyncio.run(scene())
    assert service.outcomes() == {"abort": 1.0}
