"""Chat formats of model families over a scripted engine: reasoning, content and tool calls, complete and streamed."""

from pathlib import Path
from typing import Any

import pytest

from cluster.api.core.fields import WARNING_HEADER
from cluster.api.core.tokenizer import ChatTokenizer
from cluster.api.http.routes import make_app
from cluster.chat.formats.choose import canonical_parser_names
from tests.serving.api.scripted import EOS, Client, ScriptedService, events, save_tokenizer
from tests.serving.api.test_tools import HI, NOW, SPECIAL_TOKENS, WEATHER, complete_message, streamed_message
from tests.unit.chat.transcripts import OSLO

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% if m['reasoning_content'] %}({{ m['reasoning_content'] }}){% endif %}"
    "{% for call in m['tool_calls'] %}{{ call['function']['name'] }}:{{ call['function']['arguments']['city'] }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if tools %}{{ tools | map(attribute='function.name') | join(',') }}{% endif %}"
    "{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("formats"), TEMPLATE, [m for m in SPECIAL_TOKENS if "think" not in m])


def serve_with_parsers(
    folder: Path, tool_call_parser: str, reasoning_parser: str | None = None
) -> tuple[Client, ScriptedService]:
    """A client and its service, with these two parsers."""
    service = ScriptedService(folder)
    service.tokenizer = ChatTokenizer.load(str(folder), canonical_parser_names(tool_call_parser, reasoning_parser))
    return Client(make_app(service)), service


def ids_of(service: ScriptedService, text: str) -> list[int]:
    """The token ids of a text; each special token in the text becomes one id."""
    assert service.tokenizer is not None
    return service.tokenizer.text_tokenizer.encode(text, False)


def message_of(client: Client, **body: Any) -> dict[str, Any]:
    response = client.chat(**body)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def test_tool_calls_with_special_tokens_respect_stop_strings(folder: Path) -> None:
    client, service = serve_with_parsers(folder, "mistral")
    service.engine.script = ids_of(service, f"I look.[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]now[ARGS]{{}}")
    body = {"messages": HI, "tools": [WEATHER, NOW], "max_tokens": 200}
    message = complete_message(client, **body)
    calls = [{"name": "weather", "arguments": OSLO}, {"name": "now", "arguments": "{}"}]
    assert message == {"content": "I look.", "tool_calls": calls, "finish_reason": "tool_calls"}
    assert streamed_message(client, **body) == message
    for stop, content in ((["ook"], "I l"), (["look."], "I "), (["I look.w"], None)):
        stopped = complete_message(client, **body, stop=stop)
        assert stopped == {"content": content, "tool_calls": [], "finish_reason": "stop"}, stop
        assert streamed_message(client, **body, stop=stop) == stopped
    plain = client.chat(messages=HI, max_tokens=200, tool_choice="none", tools=[WEATHER]).json()["choices"][0]
    assert "tool_calls" not in plain["message"] and plain["finish_reason"] == "stop"
    assert OSLO in plain["message"]["content"]


def test_tool_calls_in_an_answer_have_unique_ids(folder: Path) -> None:
    client, service = serve_with_parsers(folder, "hermes")
    service.engine.script = f"ok\n{CALL}".encode()
    answer = client.chat(messages=HI, tools=[WEATHER], max_tokens=200, n=2).json()
    for choice in answer["choices"]:
        [call] = choice["message"]["tool_calls"]
        assert call == {"id": call["id"], "type": "function", "function": {"name": "weather", "arguments": OSLO}}
        assert call["id"].startswith("call_")
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]}
    assert len(ids) == 2
    service.engine.script = CALL.encode()
    assert message_of(client, messages=HI, tools=[WEATHER], max_tokens=200)["content"] is None


@pytest.mark.parametrize("opener", ["model opens the block", "prompt opens the block"])
def test_reasoning_is_separated_from_content_and_counted(folder: Path, opener: str) -> None:
    client, service = serve_with_parsers(folder, "hermes", "think")
    begin, body = "<think>\n", {"messages": HI, "max_tokens": 200}
    if opener == "prompt opens the block":
        body["messages"] = [*HI, {"role": "assistant", "content": "<think>\nI"}]
        body["continue_final_message"] = True
        begin = ""
    service.engine.script = f"{begin}hm, so\n</think>\n\nYes.".encode()
    answer = client.chat(**body).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Yes.", "hm, so", "hm, so")
    reasoning_token_count = len(f"{begin}hm, so\n</think>") - max(0, len("<think>") - 1 if begin else 0)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == reasoning_token_count
    deltas = [chunk["choices"][0]["delta"] for chunk in events(client.chat(**body, stream=True))]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm, so"
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    hidden = message_of(client, **body, include_reasoning=False)
    assert hidden["content"] == "Yes." and "reasoning_content" not in hidden
    mixed = message_of(client, **body, separate_reasoning=False)
    assert mixed["content"] == f"{begin}hm, so\n</think>\n\nYes." and "reasoning_content" not in mixed


def test_template_argument_or_effort_none_turns_thinking_off(folder: Path) -> None:
    client, service = serve_with_parsers(folder, "hermes", "think")
    service.engine.script = b"<think> is a tag"
    for body in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        assert message_of(client, messages=HI, max_tokens=99, **body)["content"] == "<think> is a tag"
        prompt = service.engine.requests[-1].prompt_token_ids
        assert bytes(i for i in prompt if i < 256).endswith(b"<think>\n\n</think>\n\n")
    message_of(client, messages=HI, max_tokens=9, reasoning_effort="high")
    assert b"[high]" in bytes(i for i in service.engine.requests[-1].prompt_token_ids if i < 256)


def test_harmony_format_gives_reasoning_tool_calls_and_content(folder: Path) -> None:
    client, service = serve_with_parsers(folder, "gpt-oss")
    service.engine.script = ids_of(
        service,
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{OSLO}",
    )
    message = message_of(client, messages=HI, tools=[WEATHER], max_tokens=200)
    assert (message["content"], message["reasoning_content"]) == (None, "Think.")
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": OSLO}
    service.engine.script = ids_of(service, "<|channel|>final<|message|>Done.<|return|>")
    assert message_of(client, messages=HI, max_tokens=200)["content"] == "Done."


def test_history_reasoning_and_tool_calls_reach_the_template(folder: Path) -> None:
    client, service = serve_with_parsers(folder, "hermes")
    assistant = {
        "role": "assistant",
        "content": None,
        "reasoning": "why",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": OSLO}}],
    }
    messages = [*HI, assistant, {"role": "tool", "tool_call_id": "c1", "content": "rain"}]
    client.chat(messages=messages, max_tokens=2)
    prompt = bytes(i for i in service.engine.requests[-1].prompt_token_ids if i < 256).decode()
    assert prompt == "user\nhi\nassistant\n(why)weather:Oslo\ntool\nrain\nassistant\n"
    body = {"messages": messages, "tools": [WEATHER, NOW]}
    ids = client.post("/tokenize", body).json()["tokens"]
    assert b"weather,now" in bytes(i for i in ids if i < 256)
    client.chat(**body, max_tokens=2)
    assert list(service.engine.requests[-1].prompt_token_ids) == ids


def test_continue_final_message_continues_the_last_message(folder: Path) -> None:
    client, service = serve_with_parsers(folder, "hermes")
    messages = [*HI, {"role": "assistant", "content": "once upon"}]
    service.engine.script = b" a time"
    assert message_of(client, messages=messages, continue_final_message=True, max_tokens=9)["content"] == " a time"
    ids = list(service.engine.requests[-1].prompt_token_ids)
    assert bytes(i for i in ids if i < 256) == b"user\nhi\nassistant\nonce upon"
    tokenize_body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert client.post("/tokenize", tokenize_body).json()["tokens"] == ids


def test_unread_reasoning_effort_gives_a_warning(client: Client) -> None:
    answer = client.chat(reasoning_effort="low", max_tokens=2)
    assert answer.status_code == 200 and "does not read 'low'" in answer.headers[WARNING_HEADER]
    assert client.chat(reasoning_effort="none", max_tokens=2).status_code == 200
    count = client.post("/v1/responses/input_tokens", {"input": "hi", "reasoning": {"effort": "low"}})
    assert count.status_code == 200 and "does not read 'low'" in count.headers[WARNING_HEADER]


def test_server_info_names_the_tool_call_and_reasoning_parsers(folder: Path, tokenizer_folder: Path) -> None:
    server_info = serve_with_parsers(folder, "llama3", "deepseek-r1")[0].get("/server_info").json()
    assert (server_info["tool_call_parser"], server_info["reasoning_parser"]) == ("llama3_json", "think")
    default_info = Client(make_app(ScriptedService(tokenizer_folder))).get("/server_info").json()
    assert (default_info["tool_call_parser"], default_info["reasoning_parser"]) == ("none", "none")


def test_incomplete_tool_call_is_returned_as_text(folder: Path) -> None:
    client, service = serve_with_parsers(folder, "hermes")
    service.engine.script = [*CALL.encode()[:40], EOS]
    body = {"messages": HI, "tools": [WEATHER], "max_tokens": 200}
    message = complete_message(client, **body)
    assert message == streamed_message(client, **body)
    assert message == {"content": CALL[:40], "tool_calls": [], "finish_reason": "stop"}


@pytest.mark.parametrize("tag_format", [None, "x", []])
def test_structural_tag_without_a_format_is_refused_when_tools_are_given(folder: Path, tag_format: Any) -> None:
    client, _ = serve_with_parsers(folder, "hermes")
    structural_tag = {"type": "structural_tag", "format": tag_format}
    refused = client.chat(messages=HI, tools=[WEATHER], response_format=structural_tag)
    assert refused.status_code == 400 and "format" in refused.json()["error"]["message"], refused.text
