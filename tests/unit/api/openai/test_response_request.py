"""A body of /v1/responses becomes a chat request: each item and field has its place in it, and no field is unknown."""

from typing import Any, get_args

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from openai.types.responses.response_includable import ResponseIncludable

from cluster.api.core.adapter import Origins
from cluster.api.core.conversation import ChatRequest
from cluster.api.core.errors import ApiError
from cluster.api.core.translated import EXTENSIONS
from cluster.api.openai.responses.fields import HARMLESS, REFUSED, REMEDIES, TABLE
from cluster.api.openai.responses.request import IncludeOption, ResponseRequest


def chat_of(**body: Any) -> ChatRequest:
    request, warnings = ResponseRequest.read({"input": "hi", **body})
    assert not warnings
    return request.to_chat().chat


def messages_of(**body: Any) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_defaults=True) for message in chat_of(**body).messages]


def error_of(**body: Any) -> ApiError:
    with pytest.raises(ApiError) as captured_error:
        chat_of(**body)
    return captured_error.value


CALL = {
    "type": "function_call",
    "call_id": "c1",
    "name": "find",
    "arguments": '{"x": 1}',
    "id": "fc_1",
    "status": "completed",
}
ASSISTANT_MESSAGE = {
    "type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": None,
    "content": [
        {"type": "output_text", "text": "I ", "annotations": [], "logprobs": []},
        {"type": "refusal", "refusal": "no"},
    ],
}  # fmt: skip
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def test_input_text_becomes_a_user_message_after_the_instructions() -> None:
    assert messages_of() == [{"role": "user", "content": "hi"}]
    expected = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert messages_of(instructions="be brief") == expected


def test_items_of_an_assistant_turn_become_one_message() -> None:
    second_call = {**CALL, "call_id": "c2", "name": "ask", "arguments": "{}"}
    results = [
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
    ]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    user_message = {"role": "user", "content": parts}
    messages = messages_of(
        input=[
            {"role": "developer", "content": "rules"},
            user_message,
            REASONING,
            ASSISTANT_MESSAGE,
            CALL,
            second_call,
            *results,
        ]
    )
    tool_calls = [
        {"id": "c1", "function": {"name": "find", "arguments": '{"x": 1}'}},
        {"id": "c2", "function": {"name": "ask"}},
    ]
    assert messages == [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "I no", "reasoning_content": "hm", "tool_calls": tool_calls},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
    ]


def test_consecutive_assistant_turns_stay_separate() -> None:
    messages = messages_of(
        input=[
            ASSISTANT_MESSAGE,
            ASSISTANT_MESSAGE,
            CALL,
            REASONING,
            CALL,
            {"type": "reasoning", "summary": []},
            ASSISTANT_MESSAGE,
        ]
    )
    outline = [[*message] for message in messages]
    assert outline == [
        ["role", "content"],
        ["role", "content", "tool_calls"],
        ["role", "content", "tool_calls", "reasoning_content"],
        ["role", "content"],
    ]


def test_reasoning_summary_replaces_missing_reasoning_content() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}], "content": None}
    assert messages_of(input=[summary, ASSISTANT_MESSAGE])[0]["reasoning_content"] == "in short"


def test_response_fields_become_chat_fields() -> None:
    tool = {"name": "find", "description": "d", "parameters": {"type": "object"}, "strict": True}
    schema = {"name": "p", "schema": {"type": "object"}, "strict": True}
    chat = chat_of(
        max_output_tokens=7, stream=True, temperature=0.5, top_p=0.9, seed=3, top_k=5, stop=["x"], cache_salt="s",
        tools=[{"type": "function", **tool}], tool_choice={"type": "function", "name": "find"},
        parallel_tool_calls=False, reasoning={"effort": "high"}, text={"format": {"type": "json_schema", **schema}},
        include=["message.output_text.logprobs"], top_logprobs=3,
    )  # fmt: skip
    assert (chat.max_completion_tokens, chat.stream, chat.temperature, chat.top_p) == (7, True, 0.5, 0.9)
    assert (chat.seed, chat.top_k, chat.stop, chat.cache_salt) == (3, 5, ["x"], "s")
    assert [chat_tool.function.model_dump() for chat_tool in chat.tools] == [tool]
    assert (chat.choice.mode, chat.choice.names, chat.parallel_tool_calls) == ("required", ("find",), False)
    assert chat.reasoning_effort == "high"
    assert chat.response_format == {"type": "json_schema", "json_schema": schema}
    assert (chat.logprobs, chat.top_logprobs) == (True, 3)
    plain = chat_of()
    assert (plain.logprobs, plain.top_logprobs, plain.max_completion_tokens, plain.stream) == (False, None, None, False)
    assert plain == ChatRequest.read({"messages": [{"role": "user", "content": "hi"}], "tool_choice": "auto"})[0]


def test_allowed_tools_limit_the_callable_tools() -> None:
    tools = [{"type": "function", "name": name} for name in "abc"]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}
    chat = chat_of(tools=tools, tool_choice=choice)
    assert [tool.function.name for tool in chat.callable_tools] == ["b"]
    assert len(chat.template_tools) == 3


@pytest.mark.parametrize("form", [{"type": "text"}, {"type": "json_object"}])
def test_text_formats_without_a_schema_pass_unchanged(form: dict[str, Any]) -> None:
    assert chat_of(text={"format": form, "verbosity": "medium"}).response_format == form


def test_every_responses_api_field_has_exactly_one_category() -> None:
    model_fields = {*ResponseRequest.model_fields}
    api_fields = {*ResponseCreateParamsStreaming.__annotations__}
    for base in ResponseCreateParamsStreaming.__orig_bases__:  # type: ignore[attr-defined]
        api_fields |= {*base.__annotations__}
    assert len(api_fields) > 30
    for name in api_fields:
        kinds = [name in model_fields, name in EXTENSIONS, name in HARMLESS, name in REFUSED]
        assert sum(kinds) == 1, (name, kinds)
    assert {*REFUSED} <= {*REMEDIES}
    assert {*get_args(IncludeOption)} == {*get_args(ResponseIncludable)}


def test_chat_only_fields_are_refused_and_not_ignored() -> None:
    for name in ChatRequest.model_fields:
        assert name in ResponseRequest.honoured() or name in TABLE.refused or name in TABLE.harmless, name
    assert error_of(n=2).param == "n"
    assert error_of(return_token_ids=True).param == "return_token_ids"
    assert chat_of(n=1, return_token_ids=False).n == 1


@pytest.mark.parametrize("field", REFUSED)
def test_refused_field_error_names_the_remedy(field: str) -> None:
    error = error_of(**{field: {"asks": "for something"}})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert REMEDIES[field] in error.message
    for neutral in (None, *REFUSED[field]):
        chat_of(**{field: neutral})


def test_translated_errors_name_the_field_of_the_request_body() -> None:
    origins = Origins({"messages": "input", "messages.2": "input.5", "messages.2.tool_calls.0.function": "input.6"})
    assert origins.body_path("messages") == "input"
    assert origins.body_path("messages.2.role") == "input.5.role"
    assert origins.body_path("messages.2.tool_calls.0.function.arguments") == "input.6.arguments"
    assert origins.body_path("seed") == "seed"
    with pytest.raises(ApiError) as captured_error, origins.translate_errors():
        raise ApiError("messages.2: no", status=404, param="messages.2", code="c", kind="k", headers={"a": "b"})
    error = captured_error.value
    assert (error.message, error.param, error.status, error.code) == ("input.5: no", "input.5", 404, "c")
    assert (error.kind, error.headers) == ("k", {"a": "b"})


def test_text_of_a_result_of_another_tool_comes_from_its_item() -> None:
    """Its text is made of several fields, so an error names the item."""
    call = {"type": "local_shell_call", "id": "l", "call_id": "l1", "action": {"type": "exec", "command": ["ls"]}}
    output = {"type": "local_shell_call_output", "id": "l1", "output": "a.txt"}
    request, _ = ResponseRequest.read({"input": [{"role": "user", "content": "hi"}, call, output]})
    assert request.to_chat().origins.body_path("messages.2.content") == "input.2"
