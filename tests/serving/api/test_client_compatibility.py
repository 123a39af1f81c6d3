"""What client applications send beyond the API specifications, and what they read in answers."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.api.anthropic.blocks import BILLING_PREFIX
from cluster.api.core import wire
from cluster.api.core.errors import ApiError
from cluster.api.core.fields import WARNING_HEADER
from cluster.api.core.tools import Function
from cluster.api.core.wire import KEEP_ALIVE, EventStream
from cluster.api.http.routes import make_app
from tests.serving.api.scripted import MODEL, Client, ScriptedService, save_tokenizer
from tests.serving.api.test_tools import HI

STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}"
    "{% if m['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('Unexpected message role.') }}"
    "{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("strict"), STRICT_TEMPLATE, [])


def prompt_of(service: ScriptedService) -> str:
    assert service.tokenizer is not None
    return service.tokenizer.text_tokenizer.backend_tokenizer.decode(
        list(service.engine.requests[-1].prompt_token_ids), skip_special_tokens=False
    )


def test_developer_messages_join_the_system_message_of_strict_templates(folder: Path) -> None:
    """Codex and OpenAI's SDKs send the role developer. A template for one system message gets all system text in it."""
    service = ScriptedService(folder)
    client = Client(make_app(service))
    messages = [
        {"role": "system", "content": "Be brief."},
        *HI,
        {"role": "developer", "content": "In French."},
        {"role": "user", "content": "and?"},
    ]
    assert client.chat(messages=messages, max_tokens=1).status_code == 200
    assert prompt_of(service).startswith("<|im_start|>system\nBe brief.\n\nIn French.<|im_end|>\n<|im_start|>user\nhi")
    body = {"model": MODEL, "instructions": "Be brief.", "input": [{"role": "developer", "content": "In French."}]}
    assert client.post("/v1/responses", body).status_code == 200
    assert "Be brief.\n\nIn French." in prompt_of(service)
    wrong = [*HI, {"role": "tool", "tool_call_id": "c", "content": "x"}]
    answer = client.chat(messages=wrong)
    assert answer.status_code == 400 and "Unexpected message role." in answer.json()["error"]["message"]


def test_claude_code_billing_line_is_removed_from_the_prompt(service: ScriptedService) -> None:
    """The line changes with every request. In the prompt it would prevent every prefix-cache hit."""
    client = Client(make_app(service))
    prompts = []
    for request_number in (1, 2):
        billing_block = {"type": "text", "text": f"{BILLING_PREFIX} cc_version=2; cch={request_number};"}
        system = [billing_block, {"type": "text", "text": "Be brief."}]
        body = {"model": MODEL, "messages": HI, "max_tokens": 1, "system": system}
        assert client.post("/v1/messages", body).status_code == 200
        prompts.append(service.engine.requests[-1].prompt_token_ids)
        count_body = {"model": MODEL, "messages": HI, "system": system}
        assert client.post("/v1/messages/count_tokens", count_body).json()["input_tokens"] == len(prompts[-1])
    assert prompts[0] == prompts[1]


def test_unread_fields_of_history_messages_are_named_in_a_warning(service: ScriptedService) -> None:
    client = Client(make_app(service))
    extra_fields = {"parsed": {"a": 1}, "provider_specific_fields": {"x": 1}, "id": "m1", "annotations": []}
    messages = [*HI, {"role": "assistant", "content": "yes", **extra_fields}, *HI]
    answer = client.chat(messages=messages, max_tokens=1)
    assert answer.status_code == 200
    for name in ("parsed", "provider_specific_fields", "id"):
        assert f"messages: '{name}' is not read" in answer.headers[WARNING_HEADER]
    assert "annotations" not in answer.headers[WARNING_HEADER]
    refused = client.chat(messages=[*HI, {"role": "assistant", "content": "y", "audio": {"id": "a"}}, *HI])
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages.1.audio"


def test_context_length_errors_use_the_wording_that_clients_match(service: ScriptedService) -> None:
    """LiteLLM matches OpenAI's wording. Claude Code matches Anthropic's wording, and then asks for fewer tokens."""
    client = Client(make_app(service))
    message = client.complete(prompt="x" * 10, max_tokens=32000).json()["error"]["message"]
    assert "this model's maximum context length is" in message
    assert "input length and `max_tokens` exceed context limit: 10 + 32000 > 512" in message
    body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "x" * 600}]}
    assert "prompt is too long:" in client.post("/v1/messages", body).json()["error"]["message"]


def test_sse_events_escape_all_line_breaks_of_python_splitlines() -> None:
    """LiteLLM, Dify and others read events by the lines of httpx. These end where `str.splitlines` ends a line."""
    text = "a\u2028b\u2029c\x85d\x0be"
    sent = wire.sse_event({"text": text}).decode()
    assert sent.splitlines() == [sent.removesuffix("\n\n"), ""]
    assert json.loads(sent.removeprefix("data: ")) == {"text": text}


def test_openai_hosted_tools_are_ignored_with_a_warning(client: Client) -> None:
    """Clients send hosted tools together with their functions by default. The model does not see hosted tools."""
    body = {"model": MODEL, "input": "hi", "tools": [{"type": "web_search", "external_web_access": False}]}
    answer = client.post("/v1/responses", body)
    assert answer.status_code == 200
    assert answer.headers[WARNING_HEADER] == (
        "tools.0: 'web_search' is not run by this server; the model is not told of it"
    )
    assert client.post("/v1/responses", {**body, "tool_choice": "required"}).status_code == 400


def test_empty_system_text_and_zero_top_logprobs_have_no_effect(client: Client) -> None:
    plain_tokens = client.post("/v1/messages/count_tokens", {"model": MODEL, "messages": HI}).json()
    for system in ("", []):
        body = {"model": MODEL, "messages": HI, "system": system}
        assert client.post("/v1/messages/count_tokens", body).json() == plain_tokens
    count_path = "/v1/responses/input_tokens"
    plain_count = client.post(count_path, {"model": MODEL, "input": "x"}).json()
    assert client.post(count_path, {"model": MODEL, "input": "x", "instructions": ""}).json() == plain_count
    assert client.chat(logprobs=False, top_logprobs=0).status_code == 200


def test_tool_name_may_have_128_characters() -> None:
    """Claude Code's names of plugin tools have more than 64 characters, as have OpenAI's names in the Responses API."""
    assert Function(name="f" * 128).name == "f" * 128
    with pytest.raises(ValueError, match="pattern"):
        Function(name="f" * 129)


def test_silent_stream_sends_keep_alive_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model writes a long tool call or hidden reasoning, the stream has no other events."""
    monkeypatch.setattr(wire, "KEEP_ALIVE_INTERVAL_S", 0.05)
    sent: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        for _ in range(12):
            await asyncio.sleep(0.02)
            yield b""
        yield b"data: 2\n\n"

    async def empty_source() -> AsyncGenerator[None, None]:
        for never in ():
            yield never

    async def send(message: Any) -> None:
        sent.append(message.get("body", b"start"))

    async def receive() -> Any:
        await asyncio.sleep(60)

    def raise_error(error: ApiError) -> bytes:
        raise error

    event_stream = EventStream(events(), empty_source(), {}, raise_error)
    asyncio.run(event_stream({"type": "http"}, receive, send))
    assert sent[:2] == [b"start", b"data: 1\n\n"] and sent[-2:] == [b"data: 2\n\n", b""]
    assert len(sent[2:-2]) >= 2 and set(sent[2:-2]) == {KEEP_ALIVE}


def test_omitted_sampling_fields_use_the_defaults_of_the_model(service: ScriptedService) -> None:
    """As in vLLM and SGLang. A field of the request overrides the model's default, even with the API's usual value."""
    sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    service.model = replace(service.model, sampling_defaults=sampling)
    client = Client(make_app(service))
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": HI},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": HI, "max_tokens": 2},
    }
    for path, body in bodies.items():
        answer = client.post(path, {"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        params = service.engine.requests[-1].params
        assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.95, 20), path
        assert params.adjustments is not None and params.adjustments.repetition_penalty == 1.05
        if path == "/v1/responses":
            assert (answer.json()["temperature"], answer.json()["top_p"]) == (0.6, 0.95)
        explicit_fields = (
            {"temperature": 1.0, "top_k": 0} if path != "/v1/messages" else {"temperature": 1.0, "top_k": 7}
        )
        client.post(path, {"model": MODEL, **body, **explicit_fields})
        params = service.engine.requests[-1].params
        assert (params.temperature, params.top_p, params.top_k) == (1.0, 0.95, explicit_fields["top_k"]), path
    assert client.get("/server_info").json()["sampling_defaults"] == sampling
