"""Tool calls over HTTP with a real engine: tree, chain and plain decoding give the same calls, which fit
their schemas.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cluster.api.core.fields import WARNING_HEADER
from cluster.api.core.tokenizer import ChatTokenizer
from cluster.api.http.routes import make_app
from cluster.chat.formats.choose import FORMATS, canonical_parser_names
from tests.serving.api.scripted import MODEL, Client, events, save_tokenizer
from tests.serving.api.test_engine import TREE, EngineService, stop_at_end
from tests.support.slow_cases import every_nth_fast
from tests.support.tiny_checkpoints import draft_folder, target_folder

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "days": {"type": "integer", "minimum": 0, "maximum": 30},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
STRICT_WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
HI = [{"role": "user", "content": "hi"}]
SPECIAL_TOKENS = sorted({name for format in FORMATS.values() for name in format.special_tokens})
VOCAB = 259 + len(SPECIAL_TOKENS)
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GREEDY = {"temperature": 0, "repetition_penalty": 1.3}  # without the penalty the random target writes endless spaces
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("marked"), TEMPLATE, SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def services(folder: Path) -> Iterator[list[EngineService]]:
    target = target_folder(vocab_size=VOCAB, max_position=1024)
    draft = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": draft_folder(target)}
    settings = ({**draft, **TREE}, {**draft, **CHAIN}, {})
    with stop_at_end(
        *(EngineService(str(folder), VOCAB, **engine_settings) for engine_settings in settings)
    ) as started_services:
        yield list(started_services)


def clients(services: list[EngineService], folder: Path, parser: str) -> list[Client]:
    """Clients of the services with this tool-call parser.

    Only gpt-oss parses reasoning. With other parsers the random target would begin a reasoning block and not end it.
    """
    parsers = canonical_parser_names(parser, None if parser == "gpt-oss" else "none")
    for service in services:
        service.tokenizer = ChatTokenizer.load(str(folder), parsers)
    return [Client(make_app(service)) for service in services]


def streamed_message(client: Client, **body: Any) -> dict[str, Any]:
    """Content, tool calls and finish reason of a streamed chat answer, joined from its chunks."""
    message: dict[str, Any] = {"content": None, "tool_calls": [], "finish_reason": None}
    for chunk in events(client.chat(**body, stream=True)):
        choice = chunk["choices"][0]
        delta = choice["delta"]
        if "content" in delta and (delta["content"] or message["content"] is not None):
            message["content"] = (message["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
    return message


def complete_message(client: Client, **body: Any) -> dict[str, Any]:
    """Content, tool calls and finish reason of a complete chat answer."""
    response = client.chat(**body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {"content": message["content"] or None, "tool_calls": calls, "finish_reason": choice["finish_reason"]}


@pytest.mark.parametrize(
    "sampling", [GREEDY, pytest.param({"seed": 5}, marks=pytest.mark.slow)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("parser", every_nth_fast(2, FORMATS))
def test_required_tool_call_fits_its_schema_in_every_format(
    services: list[EngineService], folder: Path, parser: str, sampling: dict[str, Any]
) -> None:
    body = {
        "messages": HI,
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 400,
        **sampling,
    }
    if parser == "gpt-oss":
        body["logit_bias"] = {str(259 + SPECIAL_TOKENS.index("<|end|>")): 100}  # ends the endless reasoning
    tree_client, chain_client, plain_client = clients(services, folder, parser)
    message = complete_message(tree_client, **body)
    assert message["finish_reason"] == "tool_calls" and message["content"] is None
    [call] = message["tool_calls"]
    assert call["name"] == "weather"
    jsonschema.validate(json.loads(call["arguments"]), SCHEMA)
    assert (
        message
        == complete_message(chain_client, **body)
        == complete_message(plain_client, **body)
        == streamed_message(tree_client, **body)
    )


@pytest.mark.parametrize("parser", FORMATS)
def test_a_named_tool_is_called_once(services: list[EngineService], folder: Path, parser: str) -> None:
    """In every format and API, also with parallel_tool_calls; only tool_choice `required` allows several calls."""
    tree_client, chain_client, _ = clients(services, folder, parser)
    sampling: dict[str, Any] = {"seed": 6}
    if parser == "gpt-oss":
        sampling["logit_bias"] = {str(259 + SPECIAL_TOKENS.index("<|end|>")): 100}  # ends the endless reasoning
    tool_choice_function = {"type": "function", "function": {"name": "now"}}
    chat_fields = {**sampling, "max_tokens": 400, "tools": [NOW, WEATHER], "parallel_tool_calls": True}
    chat_message = complete_message(tree_client, messages=HI, tool_choice=tool_choice_function, **chat_fields)
    assert chat_message == {
        "content": None,
        "tool_calls": [{"name": "now", "arguments": chat_message["tool_calls"][0]["arguments"]}],
        "finish_reason": "tool_calls",
    }
    assert json.loads(chat_message["tool_calls"][0]["arguments"]) == {}
    assert chat_message == complete_message(chain_client, messages=HI, tool_choice=tool_choice_function, **chat_fields)
    assert chat_message == streamed_message(tree_client, messages=HI, tool_choice=tool_choice_function, **chat_fields)
    body: dict[str, Any] = {"model": MODEL, **sampling, "max_output_tokens": 400, "input": "hi"}
    body |= {"tools": [{"type": "function", "name": "now"}], "tool_choice": {"type": "function", "name": "now"}}
    response = tree_client.post("/v1/responses", body).json()
    assert [item["name"] for item in response["output"] if item["type"] != "reasoning"] == ["now"], response
    body = {"model": MODEL, **sampling, "max_tokens": 400, "messages": HI}
    body |= {"tools": [{"name": "now", "input_schema": NO_ARGUMENTS}], "tool_choice": {"type": "tool", "name": "now"}}
    message = tree_client.post("/v1/messages", body).json()
    assert [block["name"] for block in message["content"] if block["type"] != "thinking"] == ["now"], message
    assert message["stop_reason"] == "tool_use"


def test_required_tool_choice_allows_several_calls(services: list[EngineService], folder: Path) -> None:
    body = {"messages": HI, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 600, **GREEDY}
    tree_client, _, plain_client = clients(services, folder, "llama3")
    message = complete_message(tree_client, **body)
    assert message == complete_message(plain_client, **body) == streamed_message(tree_client, **body)
    assert len(message["tool_calls"]) > 1
    for call in message["tool_calls"]:
        assert call["name"] == "weather"
        jsonschema.validate(json.loads(call["arguments"]), SCHEMA)


def test_custom_tool_input_follows_its_regex_or_a_warning_is_sent(services: list[EngineService], folder: Path) -> None:
    """The regex is enforced where the chat format can hold it.

    Elsewhere the model only sees the grammar, and a header says that the grammar is not enforced.
    """

    def tool(syntax: str, definition: str) -> dict[str, Any]:
        grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
        return {"type": "custom", "custom": {"name": "edit", "format": grammar}}

    choice = {"type": "custom", "custom": {"name": "edit"}}
    body = {"messages": HI, "tool_choice": choice, "max_tokens": 200, "seed": 3}
    pattern = 'a"[0-9]{2}\n(x|y)'
    tree_client = clients(services, folder, "hermes")[0]
    answer = tree_client.chat(**body, tools=[tool("regex", pattern)])
    assert WARNING_HEADER not in answer.headers
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["type"] == "custom" and re.fullmatch(pattern, call["custom"]["input"]), call
    unforced_body = {"messages": HI, "max_tokens": 2, "seed": 3}
    for parser, grammar, reason in (
        ("hermes", tool("lark", 'start: "a"'), "only regular expressions can be"),
        ("hermes", tool("regex", "(?=a)b"), "lookahead"),
        ("glm45", tool("regex", pattern), "pattern"),
    ):
        answer = clients(services, folder, parser)[0].chat(**unforced_body, tools=[grammar])
        assert answer.status_code == 200, answer.text
        warning = answer.headers[WARNING_HEADER]
        assert warning.startswith("tools.0.custom.format: the grammar is shown to the model and not enforced: ")
        assert reason in warning


def test_truncated_tool_call_is_returned_as_text(services: list[EngineService], folder: Path) -> None:
    body = {"messages": HI, "tools": [WEATHER], "tool_choice": "required", "temperature": 0, "max_tokens": 30}
    tree_client, _, plain_client = clients(services, folder, "hermes")
    message = complete_message(tree_client, **body)
    assert message == complete_message(plain_client, **body) == streamed_message(tree_client, **body)
    assert message["finish_reason"] == "length" and not message["tool_calls"]
    assert message["content"].startswith('<tool_call>\n{"name": "wea')


def test_text_answer_with_tools_is_the_same_for_tree_plain_and_stream(
    services: list[EngineService], folder: Path
) -> None:
    """The model may call a tool but answers with text."""
    tree_client, _, plain_client = clients(services, folder, "hermes")
    body = {"messages": HI, "tools": [WEATHER], "seed": 4, "max_tokens": 60, "ignore_eos": True}
    message = complete_message(tree_client, **body)
    assert message == complete_message(plain_client, **body) == streamed_message(tree_client, **body)
    assert message["finish_reason"] == "length" and not message["tool_calls"]
    strict_body = {**body, "tools": [STRICT_WEATHER], "max_tokens": 40}
    assert (
        complete_message(tree_client, **strict_body)
        == complete_message(plain_client, **strict_body)
        == streamed_message(tree_client, **strict_body)
    )


def test_response_format_with_tools_gives_text_or_a_call_by_the_schema(
    services: list[EngineService], folder: Path
) -> None:
    """The answer is either text that fits the response format, or a tool call. The bias decides between them."""
    json_schema_format = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
    body = {
        "messages": HI,
        "tools": [STRICT_WEATHER],
        "response_format": json_schema_format,
        "max_tokens": 400,
        "parallel_tool_calls": False,
    }
    tree_client, _, plain_client = clients(services, folder, "mistral")
    call_token = str(259 + SPECIAL_TOKENS.index("[TOOL_CALLS]"))
    for bias, finish_reason in ((-100, "stop"), (100, "tool_calls")):
        biased_body = {**body, "logit_bias": {call_token: bias}}
        for seed in range(3):
            message = complete_message(tree_client, **biased_body, seed=seed)
            assert message == streamed_message(tree_client, **biased_body, seed=seed)
            assert message["finish_reason"] == finish_reason
            arguments = message["tool_calls"][0]["arguments"] if message["tool_calls"] else message["content"]
            jsonschema.validate(json.loads(arguments), SCHEMA)
        assert complete_message(plain_client, **biased_body, seed=2) == message


@pytest.fixture(scope="module")
def demo() -> Iterator[EngineService]:
    draft = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(DEMO / "draft"), **TREE}
    with stop_at_end(EngineService(str(DEMO / "target"), model_path=str(DEMO / "target"), **draft)) as (service,):
        yield service


@pytest.mark.slow
def test_demo_pair_calls_required_and_named_tools(demo: EngineService) -> None:
    """The demo pair was not trained on tool calls. The grammar forces the call."""
    assert demo.tokenizer is not None
    assert (demo.tokenizer.chosen_format.call_format, demo.tokenizer.chosen_format.reasoning_format) == (
        "hermes",
        "none",
    )
    client = Client(make_app(demo))
    body = {"messages": HI, "tools": [WEATHER, NOW], "parallel_tool_calls": False, "max_tokens": 300, "seed": 3}
    for choice, name in (("required", None), ({"type": "function", "function": {"name": "weather"}}, "weather")):
        message = complete_message(client, **body, tool_choice=choice)
        assert message == streamed_message(client, **body, tool_choice=choice)
        [call] = message["tool_calls"]
        assert name in (None, call["name"]) and message["finish_reason"] == "tool_calls"
        if call["name"] == "weather":
            jsonschema.validate(json.loads(call["arguments"]), SCHEMA)


def test_unusable_tools_give_a_400_that_names_tools(
    services: list[EngineService], folder: Path, tokenizer_folder: Path
) -> None:
    def refusal(client: Client, **body: Any) -> tuple[str, str]:
        response = client.chat(**{"messages": HI, "tools": [WEATHER], **body})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        return error["param"], error["message"]

    parserless_client = clients(services, folder, "none")[0]
    param, message = refusal(parserless_client)
    assert param == "tools" and "tool_call_parser" in message
    assert parserless_client.chat(messages=HI, tools=[WEATHER], tool_choice="none", max_tokens=2).status_code == 200
    unsupported_tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    param, message = refusal(clients(services, folder, "hermes")[0], tools=[unsupported_tool], tool_choice="required")
    assert param == "tools" and "not" in message
    pattern_schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}}
    unsupported_tool = {"type": "function", "function": {"name": "f", "parameters": pattern_schema}}
    param, message = refusal(clients(services, folder, "glm45")[0], tools=[unsupported_tool], tool_choice="required")
    assert param == "tools" and "pattern" in message
    toolless_client = clients(services, tokenizer_folder, "hermes")[0]
    param, message = refusal(toolless_client)
    assert param == "tools" and "does not know tools" in message
    assert toolless_client.chat(messages=HI, tools=[WEATHER], tool_choice="none", max_tokens=2).status_code == 200
