"""OpenAI's response object and its stream of events: exact for a scripted answer, valid for the official types, and
with the same content.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cluster.api.anthropic.shape import MessageFormatter
from cluster.api.core.adapter import GenerateCall
from cluster.api.core.sequences import Delta
from cluster.api.openai.responses.request import ResponseRequest
from cluster.api.openai.responses.shape import ResponseFormatter
from cluster.chat.events import CallArguments, CallStarted, Event, ReasoningPiece, TextPiece
from cluster.request import FinishReason
from tests.serving.api.test_responses_and_messages import named_events
from tests.unit.chat.random_answers import answers, deltas_of, generate_call

OFFICIAL: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TIMES = ("created_at", "completed_at")
EVENTS: list[Event] = [
    ReasoningPiece("hm"),
    TextPiece("I "),
    TextPiece("ask"),
    CallStarted(0, "call_1", "find"),
    CallArguments(0, '{"x":1}'),
]


def formatter_of(**body: Any) -> ResponseFormatter:
    response_request, _ = ResponseRequest.read({"input": "hi", **body})
    return ResponseFormatter(response_request, generate_call("resp_1"))


@pytest.mark.parametrize(
    "make_formatter",
    [lambda call: ResponseFormatter(ResponseRequest.read({"input": "hi"})[0], call), MessageFormatter],
)
def test_formatter_keeps_no_reference_to_its_call(make_formatter: Callable[[GenerateCall], Any]) -> None:
    """The call refers to its formatter: a cycle would keep the tokens of a prompt until the next garbage collection."""
    call = generate_call("resp_1")
    assert all(value is not call for value in vars(make_formatter(call)).values())


def streamed_events(formatter: ResponseFormatter, deltas: list[Delta]) -> list[dict[str, Any]]:
    """The data of all events of the stream, after each event has been checked against the official type."""
    found = named_events((b"".join(formatter.events(delta) for delta in deltas) + formatter.final_events()).decode())
    assert [data["sequence_number"] for _, data in found] == [*range(len(found))]
    for name, data in found:
        assert data["type"] == name == OFFICIAL.validate_python(data).type
    return [data for _, data in found]


def test_scripted_answer_streams_the_exact_events() -> None:
    events = streamed_events(formatter_of(), deltas_of(EVENTS))
    event_summaries = []
    for data in events:
        summary_fields = {
            k: v for k, v in data.items() if k not in ("sequence_number", "response", "item", "part", "logprobs")
        }
        event_summaries.append(tuple(str(value).removeprefix("response.") for value in summary_fields.values()))
    assert event_summaries == [
        ("created",),
        ("in_progress",),
        ("output_item.added", "0"),
        ("content_part.added", "rs_1_0", "0", "0"),
        ("reasoning_text.delta", "rs_1_0", "0", "0", "hm"),
        ("reasoning_text.done", "rs_1_0", "0", "0", "hm"),
        ("content_part.done", "rs_1_0", "0", "0"),
        ("output_item.done", "0"),
        ("output_item.added", "1"),
        ("content_part.added", "msg_1_1", "1", "0"),
        ("output_text.delta", "msg_1_1", "1", "0", "I "),
        ("output_text.delta", "msg_1_1", "1", "0", "ask"),
        ("output_text.done", "msg_1_1", "1", "0", "I ask"),
        ("content_part.done", "msg_1_1", "1", "0"),
        ("output_item.done", "1"),
        ("output_item.added", "2"),
        ("function_call_arguments.delta", "fc_1_2", "2", '{"x":1}'),
        ("function_call_arguments.done", "fc_1_2", "2", '{"x":1}'),
        ("output_item.done", "2"),
        ("completed",),
    ]
    text = {"type": "output_text", "text": "I ask", "annotations": [], "logprobs": []}
    assert events[-1]["response"]["output"] == [
        {
            "type": "reasoning", "id": "rs_1_0", "status": "completed", "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "message", "id": "msg_1_1", "status": "completed", "role": "assistant", "content": [text]},
        {
            "type": "function_call", "id": "fc_1_2", "status": "completed", "call_id": "call_1", "name": "find",
            "arguments": '{"x":1}',
        },
    ]  # fmt: skip
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])


@settings(max_examples=150, deadline=None)
@given(events=answers(), events_per_delta=st.integers(1, 5), finish=st.sampled_from(["stop", "length"]))
def test_streamed_events_add_up_to_the_complete_response(
    events: list[Event], events_per_delta: int, finish: FinishReason
) -> None:
    deltas = deltas_of(events, events_per_delta, finish)
    response_body = formatter_of().body(deltas)
    Response.model_validate(response_body)
    text_by_item: dict[int, str] = {}
    finished_items: dict[int, Any] = {}
    for data in streamed_events(formatter_of(), deltas):
        event_type = data["type"]
        if event_type == "response.output_item.added":
            assert data["output_index"] == len(text_by_item) == len(finished_items), "one item after another"
            assert data["item"]["status"] == "in_progress"
            text_by_item[data["output_index"]] = ""
        elif event_type.endswith(".delta"):
            text_by_item[data["output_index"]] += data["delta"]
        elif event_type in ("response.output_text.done", "response.reasoning_text.done"):
            assert data["text"] == text_by_item[data["output_index"]]
        elif event_type == "response.function_call_arguments.done":
            assert data["arguments"] == text_by_item[data["output_index"]]
        elif event_type == "response.output_item.done":
            finished_items[data["output_index"]] = data["item"]
    last_response = data["response"]
    assert [*finished_items.values()] == response_body["output"] == last_response["output"]
    assert {k: v for k, v in last_response.items() if k not in TIMES} == {
        k: v for k, v in response_body.items() if k not in TIMES
    }
    for at, item in enumerate(response_body["output"]):
        assert text_by_item[at] == (
            item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        )
        cut = finish == "length" and at == len(response_body["output"]) - 1
        assert item["status"] == ("incomplete" if cut else "completed")


REQUEST_FIELDS: dict[str, Any] = {
    "instructions": "be brief",
    "max_output_tokens": 7,
    "metadata": {"a": "b"},
    "user": "me",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "parallel_tool_calls": False,
    "top_logprobs": 2,
    "include": ["message.output_text.logprobs"],
    "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "p", "schema": {"type": "object"}}},
    "reasoning": {"effort": "high", "summary": "auto"},
}


def test_response_repeats_the_requested_fields() -> None:
    body = formatter_of(**REQUEST_FIELDS).body(deltas_of([TextPiece("x")]))
    repeated_fields = {name for name in REQUEST_FIELDS if name not in ("text", "include")}
    assert {name: body[name] for name in repeated_fields} == {name: REQUEST_FIELDS[name] for name in repeated_fields}
    assert body["text"]["format"] == REQUEST_FIELDS["text"]["format"]
    assert (body["temperature"], body["top_p"], body["store"], body["truncation"]) == (0.5, 1.0, False, "disabled")
    required = {name for name, field in Response.model_fields.items() if field.is_required()}
    assert required <= {*body} and {*body} <= {*Response.model_fields, "store"}


@pytest.mark.parametrize(
    "choice", ["none", {"type": "allowed_tools", "mode": "auto", "tools": [REQUEST_FIELDS["tool_choice"]]}]
)
def test_response_repeats_the_tool_choice_unchanged(choice: Any) -> None:
    body = formatter_of(tools=REQUEST_FIELDS["tools"], tool_choice=choice).body(deltas_of([]))
    assert body["tool_choice"] == choice
    assert Response.model_validate(body).output_text == ""
