"""The response object and its stream: exact for a scripted answer, of the official types, and one answer either way."""

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
from tests.api.test_responses_and_messages import named
from tests.unit.chat.random_answers import about, answers, steps

OFFICIAL: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TIMES = ("created_at", "completed_at")
EVENTS: list[Event] = [
    ReasoningPiece("hm"),
    TextPiece("I "),
    TextPiece("ask"),
    CallStarted(0, "call_1", "find"),
    CallArguments(0, '{"x":1}'),
]


def shape_of(**body: Any) -> ResponseFormatter:
    asked, _ = ResponseRequest.read({"input": "hi", **body})
    return ResponseFormatter(asked, about("resp_1"))


@pytest.mark.parametrize(
    "of", [lambda call: ResponseFormatter(ResponseRequest.read({"input": "hi"})[0], call), MessageFormatter]
)
def test_formatter_keeps_no_reference_to_its_call(of: Callable[[GenerateCall], Any]) -> None:
    """The call refers to its shape: a cycle would keep the tokens of a prompt until the next garbage collection."""
    call = about("resp_1")
    assert all(value is not call for value in vars(of(call)).values())


def streamed(shape: ResponseFormatter, deltas: list[Delta]) -> list[dict[str, Any]]:
    """The data of all events, each of which is as it should be by itself."""
    found = named((b"".join(shape.events(delta) for delta in deltas) + shape.final_events()).decode())
    assert [data["sequence_number"] for _, data in found] == [*range(len(found))]
    for name, data in found:
        assert data["type"] == name == OFFICIAL.validate_python(data).type
    return [data for _, data in found]


def test_scripted_answer_streams_the_exact_events() -> None:
    found = streamed(shape_of(), steps(EVENTS))
    short = []
    for data in found:
        kept = {k: v for k, v in data.items() if k not in ("sequence_number", "response", "item", "part", "logprobs")}
        short.append(tuple(str(value).removeprefix("response.") for value in kept.values()))
    assert short == [
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
    assert found[-1]["response"]["output"] == [
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
    assert (found[0]["response"]["status"], found[0]["response"]["output"]) == ("in_progress", [])


@settings(max_examples=150, deadline=None)
@given(events=answers(), each=st.integers(1, 5), finish=st.sampled_from(["stop", "length"]))
def test_streamed_events_add_up_to_the_complete_response(events: list[Event], each: int, finish: FinishReason) -> None:
    deltas = steps(events, each, finish)
    whole = shape_of().body(deltas)
    Response.model_validate(whole)
    grown: dict[int, str] = {}
    done: dict[int, Any] = {}
    for data in streamed(shape_of(), deltas):
        kind = data["type"]
        if kind == "response.output_item.added":
            assert data["output_index"] == len(grown) == len(done), "one item after another"
            assert data["item"]["status"] == "in_progress"
            grown[data["output_index"]] = ""
        elif kind.endswith(".delta"):
            grown[data["output_index"]] += data["delta"]
        elif kind in ("response.output_text.done", "response.reasoning_text.done"):
            assert data["text"] == grown[data["output_index"]]
        elif kind == "response.function_call_arguments.done":
            assert data["arguments"] == grown[data["output_index"]]
        elif kind == "response.output_item.done":
            done[data["output_index"]] = data["item"]
    last = data["response"]
    assert [*done.values()] == whole["output"] == last["output"]
    assert {k: v for k, v in last.items() if k not in TIMES} == {k: v for k, v in whole.items() if k not in TIMES}
    for at, item in enumerate(whole["output"]):
        assert grown[at] == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        cut = finish == "length" and at == len(whole["output"]) - 1
        assert item["status"] == ("incomplete" if cut else "completed")


ASKED: dict[str, Any] = {
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
    body = shape_of(**ASKED).body(steps([TextPiece("x")]))
    same = {name for name in ASKED if name not in ("text", "include")}
    assert {name: body[name] for name in same} == {name: ASKED[name] for name in same}
    assert body["text"]["format"] == ASKED["text"]["format"]
    assert (body["temperature"], body["top_p"], body["store"], body["truncation"]) == (0.5, 1.0, False, "disabled")
    required = {name for name, field in Response.model_fields.items() if field.is_required()}
    assert required <= {*body} and {*body} <= {*Response.model_fields, "store"}


@pytest.mark.parametrize("choice", ["none", {"type": "allowed_tools", "mode": "auto", "tools": [ASKED["tool_choice"]]}])
def test_response_repeats_the_tool_choice_unchanged(choice: Any) -> None:
    body = shape_of(tools=ASKED["tools"], tool_choice=choice).body(steps([]))
    assert body["tool_choice"] == choice
    assert Response.model_validate(body).output_text == ""
