"""A body of /v1/messages becomes a chat request: each block and field has its place in it, and no field is unknown."""

from typing import Any

import pytest
from anthropic.types import MessageCountTokensParams, message_create_params
from anthropic.types.beta import message_create_params as beta_params

from cluster.api.anthropic.fields import HARMLESS, REFUSED, REMEDIES, TABLE
from cluster.api.anthropic.request import BUDGET_WARNING, NO_THINKING_WARNING, CountRequest, MessagesRequest
from cluster.api.core.conversation import ChatRequest
from cluster.api.core.errors import ApiError

HI = [{"role": "user", "content": "hi"}]


def chat_of(**body: Any) -> ChatRequest:
    request, warnings = MessagesRequest.read({"messages": HI, "max_tokens": 9, **body})
    assert not warnings
    return request.to_chat().chat


def messages_of(*messages: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    chat = chat_of(messages=[*messages], **body)
    return [message.model_dump(exclude_defaults=True) for message in chat.messages]


def error_of(**body: Any) -> ApiError:
    with pytest.raises(ApiError) as captured_error:
        chat_of(**body)
    return captured_error.value


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content, "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize("system", ["be brief", [text("be "), text("brief")]])
def test_system_prompt_becomes_the_first_message(system: Any) -> None:
    messages = messages_of(*HI, system=system)
    assert messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def test_content_blocks_become_chat_messages() -> None:
    tool_use = {"type": "tool_use", "id": "t1", "name": "find", "input": {"x": "é"}}
    messages = messages_of(
        {"role": "user", "content": [text("a"), text("b")]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, text("I "), text("ask"), tool_use],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [text("one")], "is_error": True},
                {"type": "tool_result", "tool_use_id": "t2"},
                text("and?"),
            ],
        },
        {"role": "system", "content": "now"},
        {"role": "user", "content": []},
    )
    call = {"id": "t1", "function": {"name": "find", "arguments": '{"x": "é"}'}}
    assert messages == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "I ask", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "and?"},
        {"role": "system", "content": "now"},
        {"role": "user", "content": ""},
    ]


def test_consecutive_messages_of_one_role_stay_separate() -> None:
    assistant_messages = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": [text("b")]}]
    assert [message["content"] for message in messages_of(*assistant_messages, *HI)] == ["a", "b", "hi"]


def test_final_assistant_message_is_continued() -> None:
    chat = chat_of(messages=[*HI, {"role": "assistant", "content": "Once"}])
    assert chat.continue_final_message
    assert not chat_of().continue_final_message


def test_messages_fields_become_chat_fields() -> None:
    schema = {"type": "object", "properties": {}}
    chat = chat_of(
        stop_sequences=["x", "y"], stream=True, temperature=0.5, top_p=0.9, top_k=5, seed=3,
        tools=[
            {"name": "find", "description": "d", "input_schema": schema},
            {"type": "custom", "name": "b", "input_schema": schema},
        ],
        tool_choice={"type": "tool", "name": "b", "disable_parallel_tool_use": True},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
    )  # fmt: skip
    assert (chat.max_tokens, chat.stop, chat.stream, chat.temperature, chat.top_p) == (9, ["x", "y"], True, 0.5, 0.9)
    assert (chat.top_k, chat.seed) == (5, 3)
    assert [tool.function.name for tool in chat.tools] == ["find", "b"]
    assert (chat.tools[0].function.description, chat.tools[0].function.parameters) == ("d", schema)
    assert (chat.choice.mode, chat.choice.names, chat.parallel_tool_calls) == ("required", ("b",), False)
    assert chat.reasoning_effort == "high"
    assert chat.response_format["json_schema"]["schema"] == schema
    assert chat_of() == ChatRequest.read({"messages": HI, "max_tokens": 9, "stream": False, "stop": []})[0]


@pytest.mark.parametrize(("kind", "mode"), [("auto", "auto"), ("any", "required"), ("none", "none")])
def test_tool_choice_type_sets_the_chat_tool_mode(kind: str, mode: str) -> None:
    chat = chat_of(tools=[{"name": "f", "input_schema": {"type": "object"}}], tool_choice={"type": kind})
    assert (chat.choice.mode, chat.parallel_tool_calls) == (mode, True)


@pytest.mark.parametrize(
    ("thinking", "effort", "expected"),
    [
        ({"type": "disabled"}, "high", "none"),
        ({"type": "enabled", "budget_tokens": 2048}, None, None),
        ({"type": "enabled", "budget_tokens": 2048}, "max", "max"),
        ({"type": "adaptive"}, None, None),
        ({"type": "adaptive"}, "low", "low"),
        (None, "low", "low"),
    ],
)
def test_thinking_and_effort_set_reasoning_effort(thinking: Any, effort: str | None, expected: str | None) -> None:
    assert chat_of(thinking=thinking, output_config={"effort": effort}).reasoning_effort == expected


def test_thinking_options_are_mapped_or_give_a_warning() -> None:
    def warnings_of(can_think: bool, **thinking: Any) -> list[str]:
        request, _ = MessagesRequest.read({"messages": HI, "max_tokens": 9, "thinking": thinking})
        return request.thinking_warnings(can_think)

    for can_think, expected in ((True, [BUDGET_WARNING]), (False, [NO_THINKING_WARNING])):
        assert warnings_of(can_think, type="enabled", budget_tokens=2048) == expected
        assert warnings_of(can_think, type="adaptive") == warnings_of(can_think, type="disabled") == []
    enabled = chat_of(thinking={"type": "enabled"}, chat_template_kwargs={"a": 1})
    assert enabled.chat_template_kwargs == {"enable_thinking": True, "thinking": True, "a": 1}
    assert error_of(thinking={"type": "enabled"}, chat_template_kwargs=5).param == "chat_template_kwargs"
    assert chat_of(thinking={"type": "adaptive", "display": "omitted"}).include_reasoning is False
    assert chat_of(thinking={"type": "adaptive"}).include_reasoning is True


def test_every_messages_api_field_has_exactly_one_category() -> None:
    model_fields = {*MessagesRequest.model_fields}
    api_fields = {
        *message_create_params.MessageCreateParamsBase.__annotations__,
        "stream",
        "temperature",
        "top_p",
        "top_k",
    }
    api_fields |= {*beta_params.MessageCreateParamsBase.__annotations__, *MessageCountTokensParams.__annotations__}
    assert len(api_fields) > 25
    for name in api_fields:
        kinds = [name in model_fields, name in MessagesRequest.extensions, name in HARMLESS, name in REFUSED]
        assert sum(kinds) == 1, (name, kinds)
    assert {*REFUSED} <= {*REMEDIES}
    assert {*CountRequest.model_fields} < model_fields


def test_chat_only_fields_are_refused_and_not_ignored() -> None:
    for name in ChatRequest.model_fields:
        assert name in MessagesRequest.honoured() or name in TABLE.refused or name in TABLE.harmless, name
    assert error_of(stop="x").param == "stop"
    assert error_of(n=2).param == "n"


@pytest.mark.parametrize("field", REFUSED)
def test_refused_field_error_names_the_remedy(field: str) -> None:
    error = error_of(**{field: {"asks": "for something"}})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert REMEDIES[field] in error.message
    for neutral in (None, *REFUSED[field]):
        chat_of(**{field: neutral})
