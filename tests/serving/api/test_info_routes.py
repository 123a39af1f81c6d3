"""The routes that do not generate (models, health, server info, metrics, tokenize), and warnings about fields."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.actors.messages import GangHistory
from cluster.api.core.conversation import ChatRequest, TokenizeRequest
from cluster.api.core.fields import HARMLESS, WARNING_HEADER
from cluster.api.http import routes
from cluster.api.http.routes import make_app
from tests.serving.api.scripted import CONTEXT, IM_START, MODEL, Client, ScriptedService, save_tokenizer


def test_models_route_lists_the_served_model(client: Client) -> None:
    card = {
        "id": MODEL,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "aerie",
        "root": MODEL,
        "parent": None,
        "max_model_len": CONTEXT,
    }
    assert client.get("/v1/models").json() == {"object": "list", "data": [card]}
    assert client.get("/v1/models/demo").json() == card
    assert client.get("/v1/models/org/demo").json()["error"]["code"] == "model_not_found"


def test_health_follows_the_engine(client: Client, service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/health", "/ready"):
        healthy = client.get(path)
        assert (healthy.status_code, healthy.content) == (200, b"")
        service.engine.reason = "rank 1 has not stepped for 6.0 s"
        unhealthy = client.get(path)
        assert unhealthy.status_code == 503 and int(unhealthy.headers["retry-after"]) >= 1
        assert unhealthy.json()["error"]["message"] == "rank 1 has not stepped for 6.0 s"
        service.engine.reason = ""
        assert client.get(path).status_code == 200

    async def stuck() -> None:
        await asyncio.sleep(30)

    monkeypatch.setattr(service.engine, "status", stuck)
    monkeypatch.setattr(routes, "STATUS_TIMEOUT_S", 0.05)
    assert "did not answer within" in client.get("/health").json()["error"]["message"]


@pytest.mark.parametrize(("start_s", "retry_after"), [(None, "5"), (0.0, "5"), (12.2, "13")])
@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_retry_after_of_a_lost_engine_is_its_first_start_time(
    client: Client, service: ScriptedService, path: str, start_s: float | None, retry_after: str
) -> None:
    service.engine.reason = "rank 0 died"
    if start_s is not None:
        service.engine.history = GangHistory(start_seconds=start_s)
    assert client.get(path).headers["retry-after"] == retry_after


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/metrics", "/v1/models", "/v1/models/demo", "/version", "/none"]
)
def test_head_request_answers_like_get_without_a_body(client: Client, path: str) -> None:
    head, get = client.request("HEAD", path), client.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type" if get.content else "content-length"]
    assert client.request("HEAD", "/v1/completions").status_code == 405


def test_server_info_shows_config_ranks_and_limits(client: Client) -> None:
    info = client.get("/server_info").json()
    assert (info["page_size"], info["config"]["model_path"]) == (16, "none")
    assert [(rank["pid"], rank["steps"], rank["accept_length"]) for rank in info["ranks"]] == [(7, 3, 2.5)]
    assert (info["epoch"], info["restarts"]) == (0, [])
    assert info["internal_states"] == [{"avg_spec_accept_length": 2.5}]
    assert info["limits"]["body_bytes"] == 1 << 20
    assert client.get("/version").json() == {"version": info["version"]}


def test_metrics_route_counts_request_outcomes(client: Client, service: ScriptedService) -> None:
    client.complete()
    client.complete(n=200)
    service.engine.queue_is_full = True
    client.complete(stream=True)
    page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert service.outcomes() == {"length": 1.0, "invalid": 1.0, "overloaded": 1.0}
    assert 'aerie_requests_total{model_name="demo",outcome="length"} 1.0' in page.text
    assert 'aerie_ttft_seconds_count{model_name="demo"} 1.0' in page.text
    assert 'aerie_open_requests{model_name="demo",state="streaming"} 0.0' in page.text


def test_tokenize_and_detokenize_round_trip_and_name_bad_fields(client: Client) -> None:
    tokenized = client.post("/tokenize", {"model": MODEL, "prompt": "héllo"}).json()
    assert tokenized == {"count": 6, "max_model_len": CONTEXT, "tokens": list("héllo".encode())}
    assert client.post("/detokenize", {"tokens": tokenized["tokens"]}).json() == {"prompt": "héllo"}
    chat = client.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    assert chat["tokens"][0] == IM_START
    chat_body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    requests = [
        {"prompt": "x"},
        chat_body,
        {**chat_body, "add_special_tokens": True},
        {"prompt": "x", "add_special_tokens": False},
    ]
    assert [TokenizeRequest.model_validate(request).adds_special_tokens for request in requests] == [
        True,
        False,
        True,
        False,
    ]
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/detokenize", {"tokens": [1, 999]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
    ):
        assert client.post(path, body).json()["error"]["param"] == param


def test_unknown_fields_are_accepted_with_a_warning(client: Client) -> None:
    answer = client.complete(temprature=0.5, **{"weiß\r\nX-Evil: 1": 1})
    assert answer.status_code == 200
    warning = answer.headers[WARNING_HEADER]
    assert "unknown field 'temprature' ignored; did you mean 'temperature'?" in warning
    assert "wei\\xdf\\r\\nX-Evil" in warning
    assert "x-evil" not in answer.headers
    many_unknown = client.complete(stream=True, **{f"zz{i}" * 500: 1 for i in range(20)})
    assert "and 12 more" in many_unknown.headers[WARNING_HEADER]
    assert len(many_unknown.headers[WARNING_HEADER]) < 1000


def test_harmless_fields_pass_without_a_warning(client: Client) -> None:
    harmless_in_chats = HARMLESS - ChatRequest.model_fields.keys()  # a chat honours some of them
    for answer in (
        client.chat(**dict.fromkeys(harmless_in_chats, "x")),
        client.complete(**dict.fromkeys(HARMLESS, "x")),
    ):
        assert answer.status_code == 200
        assert WARNING_HEADER not in answer.headers


def test_text_request_without_a_tokenizer_gives_a_400(client: Client, service: ScriptedService) -> None:
    service.tokenizer = None
    for answer, param in (
        (client.chat(), "messages"),
        (client.complete(), "prompt"),
        (client.complete(prompt=[1], stop="x"), "stop"),
        (client.post("/tokenize", {"prompt": "x"}), "prompt"),
        (client.post("/detokenize", {"tokens": [1]}), "tokens"),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert "without a tokenizer" in answer.json()["error"]["message"]


def test_tokenizer_without_a_chat_template_serves_only_completions(tmp_path: Path) -> None:
    service = ScriptedService(save_tokenizer(tmp_path, template=None))
    client = Client(make_app(service))
    assert client.complete().status_code == 200
    assert "no chat template" in client.chat().json()["error"]["message"]


def test_openapi_document_refers_to_the_request_schemas(client: Client) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path, name in (("/v1/completions", "CompletionRequest"), ("/v1/chat/completions", "ChatRequest")):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        assert {"temperature", "stop", "seed"} <= set(schemas[name]["properties"])
    assert {"type": "string", "minLength": 1} in schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert "$defs" not in str(document)


def test_health_is_503_when_the_engine_status_raises(client: Client, service: ScriptedService) -> None:
    async def broken() -> None:
        raise RuntimeError("/secret")

    service.engine.status = broken  # type: ignore[method-assign, assignment]
    answer = client.get("/health")
    assert answer.status_code == 503
    assert "secret" not in answer.text
