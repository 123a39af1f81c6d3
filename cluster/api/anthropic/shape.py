"""Reads bodies of Anthropic's Messages API, and writes its answers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from cluster.api.anthropic.request import CountRequest, MessagesRequest
from cluster.api.core.adapter import CoreRequest, GenerateCall
from cluster.api.core.errors import ApiError
from cluster.api.core.limits import RequestLimits
from cluster.api.core.sequences import Delta, usage
from cluster.api.core.service import ServedModel
from cluster.api.core.tools import unsupported_tool_warnings
from cluster.api.core.wire import sse_event
from cluster.chat.events import Section, SectionDelta, SectionEvent, Sections, SectionStarted
from cluster.chat.formats.choose import NONE

ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
}

_ERROR_TYPE_NAMES = sorted({*ERROR_TYPES.values(), "invalid_request_error", "overloaded_error"})
ENVELOPE_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"enum": _ERROR_TYPE_NAMES}, "message": {"type": "string"}},
        },
    },
}
"""The JSON schema of Anthropic's error envelope."""


def anthropic_envelope(error: ApiError) -> dict[str, Any]:
    """Return Anthropic's error envelope: the body of an error answer, or the data of the event `error`."""
    error_type = ERROR_TYPES.get(error.status, "api_error" if error.status > 500 else "invalid_request_error")
    if error.code == "overloaded":
        error_type = "overloaded_error"
    return {"type": "error", "error": {"type": error_type, "message": error.message}}


NamedEvent = tuple[str, dict[str, Any]]
SIGNATURE = "unsigned"
"""The signature of every thinking block. If a thinking block has no signature, clients do not send it back in the next
request. This server ignores the signatures that it receives.
"""


class MessageFormatter:
    """Writes the answer to one call: one message. Text, reasoning and tool calls become its blocks, in order."""

    keep_alive = sse_event({"type": "ping"}, "ping")

    def __init__(self, call: GenerateCall) -> None:
        # `call` itself is not stored: it refers to this formatter, and such a cycle would keep long prompts in memory.
        self._id, self._model, self._choices = call.call_id, call.model, call.choices
        self._sections = Sections(call.shows_reasoning)
        self._end_fields: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._started = False

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the whole message."""
        for delta in deltas:
            for _ in self._block_events(delta):
                pass
        return self._message([_complete_block(section) for section in self._sections.sections])

    def events(self, delta: Delta) -> bytes:
        """Return the events of one delta; the first delta also opens the message, and the last one ends it."""
        named_events = [] if self._started else [("message_start", {"message": self._message([])}), ("ping", {})]
        self._started = True
        named_events += self._block_events(delta)
        if delta.finish_reason is not None:
            named_events.append(("message_delta", {"delta": self._end_fields, "usage": self._usage()}))
            named_events.append(("message_stop", {}))
        return b"".join(sse_event({"type": name, **data}, name) for name, data in named_events)

    def final_events(self) -> bytes:
        """Return no bytes, because the events of the last delta have ended the message."""
        return b""

    def error_events(self, error: ApiError) -> bytes:
        """Return the event `error`, whose data is Anthropic's error envelope."""
        return sse_event(anthropic_envelope(error), "error")

    def _block_events(self, delta: Delta) -> Iterator[NamedEvent]:
        """Yield the events about blocks that one delta causes."""
        for change in self._sections.add(delta.events):
            yield from _change_events(change)
        if delta.finish_reason is not None:
            for change in self._sections.end():
                yield from _change_events(change)
            self._end_fields = self._stop_fields(delta)

    def _stop_fields(self, delta: Delta) -> dict[str, Any]:
        stop_sequence = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        reason = "tool_use" if self._sections.has_calls else "end_turn"
        if delta.finish_reason == "length":
            reason = "max_tokens"
        elif stop_sequence is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop_sequence}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        identity = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**identity, "content": content, **self._end_fields, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        """Return the usage so far. As in Anthropic's API, cached tokens are not counted as input tokens."""
        call_usage = usage(self._choices)
        cached_tokens = call_usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": call_usage["prompt_tokens"] - cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
            "output_tokens": call_usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": call_usage["completion_tokens_details"]["reasoning_tokens"]},
            "service_tier": "standard",
        }


def _change_events(change: SectionEvent) -> Iterator[NamedEvent]:
    section = change.section
    index_field = {"index": section.index}
    if isinstance(change, SectionStarted):
        yield "content_block_start", {**index_field, "content_block": _empty_block(section)}
    elif isinstance(change, SectionDelta):
        yield "content_block_delta", {**index_field, "delta": _block_delta(section, change.text)}
    else:
        if section.kind == "reasoning":
            yield "content_block_delta", {**index_field, "delta": {"type": "signature_delta", "signature": SIGNATURE}}
        yield "content_block_stop", index_field


def _empty_block(section: Section) -> dict[str, Any]:
    if section.kind == "call":
        return {"type": "tool_use", "id": section.call_id, "name": section.name, "input": {}}
    if section.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _block_delta(section: Section, text: str) -> dict[str, Any]:
    if section.kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    if section.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _complete_block(section: Section) -> dict[str, Any]:
    if section.kind == "call":
        return {**_empty_block(section), "input": parse_partial_arguments(section.text)}
    if section.kind == "reasoning":
        return {"type": "thinking", "thinking": section.text, "signature": SIGNATURE}
    return {"type": "text", "text": section.text}


def parse_partial_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. If they were cut off, return the complete part, as a streaming
    client does. Return {} if they are not a JSON object.
    """
    try:
        arguments = from_json(text, allow_partial=True) if text else {}
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def read_message(
    service: ServedModel,
    limits: RequestLimits,
    body: Mapping[str, Any],
    request_class: type[CountRequest] = MessagesRequest,
) -> CoreRequest:
    """Read a body of /v1/messages, or of /v1/messages/count_tokens if `request_class` is CountRequest."""
    request, warnings = request_class.read(body)
    chat, origins = request.to_checked_chat(service, limits)
    can_think = service.tokenizer is not None and service.tokenizer.chosen_format.reasoning_format != NONE
    warnings += [
        *map(origins.translate_warning, unsupported_tool_warnings(chat.tools)),
        *request.thinking_warnings(can_think),
    ]
    return CoreRequest(chat, warnings, "msg_", MessageFormatter, origins, "request-id")
