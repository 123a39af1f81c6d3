"""Tool calls and reasoning in /v1/responses and /v1/messages: complete, streamed, and sent back in the next request."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from cluster.api.core.fields import WARNING_HEADER
from cluster.api.http.routes import make_app
from tests.serving.api.scripted import MODEL, Client, ScriptedService, save_tokenizer
from tests.serving.api.test_responses_and_messages import answer_text, named_events

TEMPLATE = (
    "{% for t in tools or [] %}{{ '<tool>' + t['function']['name'] }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['reasoning_content'] %}{{ '<think>' + m['reasoning_content'] + '</think>' }}{% endif %}"
    "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "{{ '<tool_call>' + c['function']['name'] + (c['function']['arguments'] | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ m['tool_call_id'] }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
OUTPUT_TEXT = (
    '<think>hm, 😀</think>I ask.<tool_call>{"name": "find", "arguments": {"x": [1, "é"]}}</tool_call>'
    '<tool_call>{"name": "rest", "arguments": {}}</tool_call>'
)
FIND_ARGUMENTS = {"x": [1, "é"]}
SCHEMA = {"type": "object", "properties": {"x": {"type": "array"}}}
OPENAI_TOOLS: list[Any] = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("find", "rest")]
ANTHROPIC_TOOLS: list[Any] = [{"name": name, "input_schema": SCHEMA} for name in ("find", "rest")]
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tools"), TEMPLATE)


@pytest.fixture
def service(folder: Path) -> ScriptedService:
    scripted_service = ScriptedService(folder)
    scripted_service.engine.script = OUTPUT_TEXT.encode()
    return scripted_service


def prompt_of(service: ScriptedService) -> str:
    assert service.tokenizer is not None
    ids = service.engine.requests[-1].prompt_token_ids
    return bytes(token for token in ids if token < 256).decode()


def test_response_holds_reasoning_message_and_function_calls(openai: OpenAI, service: ScriptedService) -> None:
    response = openai.responses.create(model=MODEL, input="hi", tools=OPENAI_TOOLS)
    reasoning, message, first_call, second_call = response.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "hm, 😀")
    assert (message.type, response.output_text) == ("message", "I ask.")
    assert (first_call.type, first_call.name, json.loads(first_call.arguments)) == (
        "function_call",
        "find",
        FIND_ARGUMENTS,
    )
    assert (second_call.name, json.loads(second_call.arguments)) == ("rest", {})
    assert first_call.call_id != second_call.call_id
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert prompt_of(service).startswith("<tool>find<tool>rest")
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
        for call in (first_call, second_call)
    ]
    service.engine.script = b"done"
    next_input = [*HI, *(item.model_dump(exclude_none=True) for item in response.output), *outputs]
    next_response = openai.responses.create(model=MODEL, input=next_input, tools=OPENAI_TOOLS)
    assert next_response.output_text == "done"
    calls = '<tool_call>find{"x": [1, "é"]}</tool_call><tool_call>rest{}</tool_call>'
    turn = f"assistant\n<think>hm, 😀</think>I ask.{calls}\n"
    assert turn + "".join(f"tool\nfound{call.call_id}\n" for call in (first_call, second_call)) in prompt_of(service)


def test_streamed_response_holds_reasoning_message_and_function_calls(openai: OpenAI) -> None:
    with openai.responses.stream(model=MODEL, input="hi", tools=OPENAI_TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
    texts = [getattr(item, "arguments", None) or item.content[0].text for item in final.output]
    assert [*deltas.values()] == texts
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert json.loads(final.output[2].arguments) == FIND_ARGUMENTS


def test_message_holds_thinking_text_and_tool_use_blocks(anthropic: Anthropic, service: ScriptedService) -> None:
    message = anthropic.messages.create(model=MODEL, max_tokens=300, messages=HI, tools=ANTHROPIC_TOOLS)
    thinking, text_block, first_use, second_use = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "hm, 😀")
    assert (text_block.type, text_block.text) == ("text", "I ask.")
    assert (first_use.type, first_use.name, first_use.input) == ("tool_use", "find", FIND_ARGUMENTS)
    assert (second_use.name, second_use.input, message.stop_reason) == ("rest", {}, "tool_use")
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": use.id, "content": "found"} for use in (first_use, second_use)
    ]
    service.engine.script = b"done"
    next_messages: list[Any] = [
        *HI,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    next_message = anthropic.messages.create(model=MODEL, max_tokens=9, messages=next_messages, tools=ANTHROPIC_TOOLS)
    assert (next_message.content[0].text, next_message.stop_reason) == ("done", "end_turn")
    calls = '<tool_call>find{"x": [1, "é"]}</tool_call><tool_call>rest{}</tool_call>'
    turn = f"assistant\n<think>hm, 😀</think>I ask.{calls}\n"
    assert turn + "".join(f"tool\nfound{use.id}\n" for use in (first_use, second_use)) in prompt_of(service)


def test_streamed_message_holds_thinking_text_and_tool_use_blocks(anthropic: Anthropic) -> None:
    with anthropic.messages.stream(model=MODEL, max_tokens=300, messages=HI, tools=ANTHROPIC_TOOLS) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert {"thinking", "text", "input_json"} <= kinds
    thinking, text_block, first_use, second_use = message.content
    assert (thinking.thinking, text_block.text, first_use.input, second_use.input) == (
        "hm, 😀",
        "I ask.",
        FIND_ARGUMENTS,
        {},
    )
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details.thinking_tokens > 0


def text_of(path: str, answer: httpx.Response, stream: bool) -> str:
    """The text of an answer, complete or streamed, that has no tool calls."""
    if not stream:
        return answer_text(path, answer.json())
    deltas = [data["delta"] for name, data in named_events(answer.text) if name.endswith(("text.delta", "block_delta"))]
    return "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_omitted_when_the_request_asks_for_that(
    folder: Path, service: ScriptedService, stream: bool
) -> None:
    client = Client(make_app(service))
    bodies = {
        "/v1/responses": {"input": "hi", "include_reasoning": False},
        "/v1/messages": {"messages": HI, "max_tokens": 300, "thinking": {"type": "adaptive", "display": "omitted"}},
    }
    for path, body in bodies.items():
        answer = client.post(path, {"model": MODEL, **body, "stream": stream})
        assert answer.status_code == 200
        text = text_of(path, answer, stream)
        assert text.startswith("I ask.") and "hm, " not in text
        assert not any(word in answer.text for word in ("thinking_delta", "reasoning_text", "hm, "))


def test_thinking_field_controls_the_prompt_and_ignored_effort_gives_a_warning(
    folder: Path, service: ScriptedService
) -> None:
    client = Client(make_app(service))

    def prompt(**thinking: Any) -> tuple[str, str]:
        body = {"model": MODEL, "messages": HI, "max_tokens": 9, "thinking": thinking}
        answer = client.post("/v1/messages", body)
        assert answer.status_code == 200, answer.text
        return prompt_of(service)[-15:], answer.headers.get(WARNING_HEADER, "")

    disabled_prompt_end = "ink>\n\n</think>\n\n"[-15:]
    assert prompt(type="disabled") == (disabled_prompt_end, "")
    enabled_prompt_end, warning = prompt(type="enabled", budget_tokens=1024)
    assert enabled_prompt_end.endswith("assistant\n") and "budget_tokens is not a limit" in warning
    assert prompt(type="adaptive")[1] == ""
    effort_body = {"model": MODEL, "messages": HI, "max_tokens": 9, "output_config": {"effort": "low"}}
    for path, body, field in (
        ("/v1/messages", effort_body, "output_config.effort"),
        ("/v1/responses", {"model": MODEL, "input": "hi", "reasoning": {"effort": "low"}}, "reasoning.effort"),
    ):
        answer = client.post(path, body)
        assert answer.status_code == 200 and prompt_of(service).endswith("assistant\n"), answer.text
        assert f"{field}: this model's chat template does not read 'low'" in answer.headers[WARNING_HEADER]


def test_forced_tool_call_gets_the_same_grammar_in_both_apis(service: ScriptedService) -> None:
    client = Client(make_app(service))
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "hi", "tools": OPENAI_TOOLS, "tool_choice": {"type": "function", "name": "find"}},
        "/v1/messages": {
            "messages": HI, "max_tokens": 9, "tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "find"},
        },
    }  # fmt: skip
    for path, body in bodies.items():
        assert client.post(path, {"model": MODEL, **body}).status_code == 200
        assert service.engine.requests[-1].params.grammar is not None
    responses_grammar, messages_grammar = (request.params.grammar for request in service.engine.requests)
    assert responses_grammar == messages_grammar


def test_messages_api_continues_a_trailing_assistant_message(service: ScriptedService) -> None:
    service.engine.script = b" upon a time"
    body = {"model": MODEL, "max_tokens": 9, "messages": [*HI, {"role": "assistant", "content": "Once"}]}
    answer = Client(make_app(service)).post("/v1/messages", body).json()
    assert prompt_of(service).endswith("assistant\nOnce")
    assert answer["content"] == [{"type": "text", "text": " upon a "[:8] + "t"}]
