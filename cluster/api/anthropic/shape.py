"""Reads bodies of Anthropic's Messages API, and writes its answers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from cluster.api.anthropic.request import CountRequest, MessagesRequest
from cluster.api.core.adapter import CoreRequest, GenerateCall
from cluster.api.core.errors import ApiError
from cluster.api.core.limits import RequestLimits
from cluster.api.core.sequences import Delta, usage
from cluster.api.core.service import Served
from cluster.api.core.tools import left_out_warnings
from cluster.api.core.wire import event
from cluster.chat.events import Change, Grown, Opened, Section, Sections
from cluster.chat.formats.choose import NONE

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
}

_KINDS = sorted({*TYPES.values(), "invalid_request_error", "overloaded_error"})
ENVELOPE: Mapping[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"enum": _KINDS}, "message": {"type": "string"}},
        },
    },
}
"""The JSON schema of the envelope."""


def anthropic_envelope(error: ApiError) -> dict[str, Any]:
    """Return the body of an error answer, or the data of the event `error`. The message names the wrong field."""
    kind = TYPES.get(error.status, "api_error" if error.status > 500 else "invalid_request_error")
    if error.code == "overloaded":
        kind = "overloaded_error"
    return {"type": "error", "error": {"type": kind, "message": error.message}}


Sent = tuple[str, dict[str, Any]]
SIGNATURE = "unsigned"
"""The signature of every thinking block. Clients do not send a block without a signature back; this server ignores its
value.
"""


class MessageShape:
    """One message. Text, reasoning and tool calls become blocks, in order."""

    alive = event({"type": "ping"}, "ping")

    def __init__(self, about: GenerateCall) -> None:
        # Not `about` itself: it refers to this shape, and such a cycle would keep long prompts in memory.
        self._id, self._model, self._choices = about.call_id, about.model, about.choices
        self._sections = Sections(about.shows_reasoning)
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._begun = False

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the whole message."""
        for delta in deltas:
            for _ in self._changed(delta):
                pass
        return self._message([_whole(section) for section in self._sections.all])

    def events(self, delta: Delta) -> bytes:
        """Return the events of one delta; the first delta also opens the message, and the last one ends it."""
        made = [] if self._begun else [("message_start", {"message": self._message([])}), ("ping", {})]
        self._begun = True
        made += self._changed(delta)
        if delta.finish_reason is not None:
            made.append(("message_delta", {"delta": self._end, "usage": self._usage()}))
            made.append(("message_stop", {}))
        return b"".join(event({"type": name, **data}, name) for name, data in made)

    def end(self) -> bytes:
        """Return nothing: `events` of the last delta has ended the message."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """Return the event `error`, whose data is Anthropic's error envelope."""
        return event(anthropic_envelope(error), "error")

    def _changed(self, delta: Delta) -> Iterator[Sent]:
        """Yield the events about blocks that one delta causes."""
        for change in self._sections.take(delta.events):
            yield from _told(change)
        if delta.finish_reason is not None:
            for change in self._sections.end():
                yield from _told(change)
            self._end = self._ended(delta)

    def _ended(self, delta: Delta) -> dict[str, Any]:
        stopped = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        reason = "tool_use" if self._sections.has_calls else "end_turn"
        if delta.finish_reason == "length":
            reason = "max_tokens"
        elif stopped is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, **self._end, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        """Return the usage so far. As in Anthropic's API, input tokens exclude those read from the cache."""
        used = usage(self._choices)
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": used["completion_tokens_details"]["reasoning_tokens"]},
            "service_tier": "standard",
        }


def _told(change: Change) -> Iterator[Sent]:
    section = change.section
    at = {"index": section.index}
    if isinstance(change, Opened):
        yield "content_block_start", {**at, "content_block": _empty(section)}
    elif isinstance(change, Grown):
        yield "content_block_delta", {**at, "delta": _delta(section, change.text)}
    else:
        if section.kind == "thought":
            yield "content_block_delta", {**at, "delta": {"type": "signature_delta", "signature": SIGNATURE}}
        yield "content_block_stop", at


def _empty(section: Section) -> dict[str, Any]:
    if section.kind == "call":
        return {"type": "tool_use", "id": section.call_id, "name": section.name, "input": {}}
    if section.kind == "thought":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(section: Section, text: str) -> dict[str, Any]:
    if section.kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    if section.kind == "thought":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _whole(section: Section) -> dict[str, Any]:
    if section.kind == "call":
        return {**_empty(section), "input": arguments_of(section.text)}
    if section.kind == "thought":
        return {"type": "thinking", "thinking": section.text, "signature": SIGNATURE}
    return {"type": "text", "text": section.text}


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call. If they were cut off, return their complete part, as a streaming client does."""
    try:
        found = from_json(text, allow_partial=True) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def read_message(
    service: Served, limits: RequestLimits, body: Mapping[str, Any], kind: type[CountRequest] = MessagesRequest
) -> CoreRequest:
    """Read a body of /v1/messages, or of /v1/messages/count_tokens with `kind` CountRequest."""
    request, warnings = kind.read(body)
    chat, origins = request.checked(service, limits)
    thinks = service.tokenizer is not None and service.tokenizer.chosen.thought != NONE
    warnings += [*map(origins.reworded, left_out_warnings(chat.tools)), *request.said_beside(thinks)]
    return CoreRequest(chat, warnings, "msg_", MessageShape, origins, "request-id")
