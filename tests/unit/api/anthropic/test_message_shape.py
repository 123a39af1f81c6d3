"""Anthropic's message and its stream of events: exact for a scripted answer, valid for the official types, and with
the same content.
"""

from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from cluster.actors.messages import Overloaded
from cluster.api.anthropic.shape import MessageFormatter, anthropic_envelope, parse_partial_arguments
from cluster.api.core.errors import ApiError, internal_error, overloaded_error, unavailable_error
from cluster.api.core.sequences import Delta
from cluster.chat.events import CallArguments, CallStarted, Event, ReasoningPiece, TextPiece
from cluster.request import FinishReason
from tests.serving.api.test_responses_and_messages import named_events
from tests.unit.chat.random_answers import answers, deltas_of, generate_call

OFFICIAL: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
EVENTS: list[Event] = [
    ReasoningPiece("hm"),
    TextPiece("I "),
    TextPiece("ask"),
    CallStarted(0, "call_1", "find"),
    CallArguments(0, '{"x":1}'),
]
TEXTS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def streamed_events(deltas: list[Delta]) -> list[dict[str, Any]]:
    """The data of all events of the stream, after each event has been checked against the official type."""
    formatter = MessageFormatter(generate_call("msg_1"))
    found = named_events((b"".join(formatter.events(delta) for delta in deltas) + formatter.final_events()).decode())
    for name, data in found:
        assert name == data["type"]
        if name != "ping":
            assert OFFICIAL.validate_python(data).type == name
    return [data for _, data in found]


def test_scripted_answer_streams_the_exact_events() -> None:
    first, *rest, delta, stop = streamed_events(deltas_of(EVENTS))
    usage = first["message"].pop("usage")
    assert first == {
        "type": "message_start",
        "message": {
            "id": "msg_1", "type": "message", "role": "assistant", "model": "demo", "content": [],
            "stop_reason": None, "stop_sequence": None,
        },
    }  # fmt: skip
    start, grow, end = "content_block_start", "content_block_delta", "content_block_stop"
    assert rest == [
        {"type": "ping"},
        {"type": start, "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"type": grow, "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": grow, "index": 0, "delta": {"type": "signature_delta", "signature": "unsigned"}},
        {"type": end, "index": 0},
        {"type": start, "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": grow, "index": 1, "delta": {"type": "text_delta", "text": "I "}},
        {"type": grow, "index": 1, "delta": {"type": "text_delta", "text": "ask"}},
        {"type": end, "index": 1},
        {"type": start, "index": 2, "content_block": {"type": "tool_use", "id": "call_1", "name": "find", "input": {}}},
        {"type": grow, "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"x":1}'}},
        {"type": end, "index": 2},
    ]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"] == usage
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 2, 9)
    assert stop == {"type": "message_stop"}


@settings(max_examples=150, deadline=None)
@given(events=answers(), events_per_delta=st.integers(1, 5), finish=st.sampled_from(["stop", "length"]))
def test_streamed_events_add_up_to_the_complete_message(
    events: list[Event], events_per_delta: int, finish: FinishReason
) -> None:
    deltas = deltas_of(events, events_per_delta, finish)
    message_body = MessageFormatter(generate_call("msg_1")).body(deltas)
    Message.model_validate(message_body)
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    is_open = False
    for data in streamed_events(deltas):
        event_type = data["type"]
        if event_type == "content_block_start":
            assert not is_open and data["index"] == len(blocks)
            is_open = True
            blocks.append(dict(data["content_block"]))
            texts.append("")
        elif event_type == "content_block_delta":
            assert is_open and data["index"] == len(blocks) - 1
            if data["delta"]["type"] == "signature_delta":
                blocks[-1]["signature"] += data["delta"]["signature"]
            else:
                texts[-1] += data["delta"][TEXTS[data["delta"]["type"]]]
        elif event_type == "content_block_stop":
            assert is_open and data["index"] == len(blocks) - 1
            is_open = False
            block = blocks[-1]
            if block["type"] == "tool_use":
                block["input"] = parse_partial_arguments(texts[-1])
            else:
                block[block["type"]] = texts[-1]
        elif event_type == "message_delta":
            assert not is_open
            assert data["delta"] == {name: message_body[name] for name in ("stop_reason", "stop_sequence")}
            assert data["usage"] == message_body["usage"]
    assert event_type == "message_stop"
    assert blocks == message_body["content"]
    has_tool_use = any(block["type"] == "tool_use" for block in blocks)
    assert message_body["stop_reason"] == (
        "max_tokens" if finish == "length" else "tool_use" if has_tool_use else "end_turn"
    )


def test_stop_reason_names_the_stop_sequence_but_no_stop_token() -> None:
    body = MessageFormatter(generate_call("msg_1")).body(
        deltas_of([TextPiece("x"), CallStarted(0, "a", "f")], stop="END")
    )
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")
    [end] = [Delta(0, finish_reason="stop", stop_reason=257)]
    body = MessageFormatter(generate_call("msg_1")).body([end])
    assert (body["stop_reason"], body["stop_sequence"], body["content"]) == (
        "end_turn",
        None,
        [{"type": "text", "text": ""}],
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": [1, {"b": "c"}]}', {"a": [1, {"b": "c"}]}),
        ("", {}),
        ('{"a": 1, "b": [2, 3', {"a": 1, "b": [2, 3]}),
        ("[1]", {}),
        ("nonsense", {}),
    ],
)
def test_parse_partial_arguments_always_returns_an_object(text: str, expected: Any) -> None:
    assert parse_partial_arguments(text) == expected


def test_error_type_follows_the_http_status() -> None:
    errors = [ApiError("m", status=status) for status in (400, 401, 403, 404, 405, 408, 413, 415, 500, 503)]
    error_types = [anthropic_envelope(error)["error"]["type"] for error in errors]
    bad = "invalid_request_error"
    assert error_types == [
        bad, "authentication_error", "permission_error", "not_found_error", bad, bad, "request_too_large", bad,
        "api_error", "api_error",
    ]  # fmt: skip
    assert anthropic_envelope(overloaded_error(Overloaded("full")))["error"] == {
        "type": "overloaded_error",
        "message": "full",
    }
    assert anthropic_envelope(unavailable_error("gone"))["error"] == {"type": "api_error", "message": "gone"}
    formatter = MessageFormatter(generate_call("msg_1"))
    assert named_events(formatter.error_events(internal_error("msg_1")).decode()) == [
        ("error", anthropic_envelope(internal_error("msg_1")))
    ]
