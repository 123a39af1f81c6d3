"""Reads bodies of the Responses API, and writes its answers."""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from cluster.api.core.adapter import CoreRequest, GenerateCall
from cluster.api.core.errors import ApiError
from cluster.api.core.limits import RequestLimits
from cluster.api.core.sequences import Delta, usage
from cluster.api.core.service import ServedModel
from cluster.api.core.tools import UnsupportedTool, unsupported_tool_warnings
from cluster.api.core.wire import KEEP_ALIVE, sse_event
from cluster.api.openai.answers import logprob_entry
from cluster.api.openai.responses.request import ResponseRequest
from cluster.api.openai.responses.tools import ClientTool
from cluster.chat.blocks import try_parse_json
from cluster.chat.events import Section, SectionDelta, SectionEvent, Sections, SectionStarted, TextPiece
from cluster.request import FinishReason

NamedEvent = tuple[str, dict[str, Any]]
ITEM_ID_PREFIXES = {"text": "msg", "reasoning": "rs", "function": "fc", "custom": "ctc", "tool_search": "tsc"}
CALL_EVENTS = {"function": "response.function_call_arguments", "custom": "response.custom_tool_call_input"}
PART_TYPES = {"text": "output_text", "reasoning": "reasoning_text"}
IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"


class ResponseFormatter:
    """Writes the answer to one call, which is one response. Texts become message items, reasoning becomes reasoning
    items, calls become call items, in order.

    The response repeats fields of the request. Its `temperature` and `top_p` are the values that were used, so they
    include defaults.
    """

    keep_alive = KEEP_ALIVE

    def __init__(self, request: ResponseRequest, call: GenerateCall) -> None:
        # `call` itself is not stored: it refers to this formatter, and such a cycle would keep long prompts in memory.
        self._id, self._model, self._choices = call.call_id, call.model, call.choices
        self._tokenizer, self._created = call.tokenizer, call.created
        chat = call.request.fields
        self._request_fields = repeated_fields(request) | {"temperature": chat.temperature, "top_p": chat.top_p}
        self._client_tools = request.chat_tools.client_tools
        self._wants_logprobs = request.wants_logprobs
        self._sections = Sections(call.shows_reasoning)
        self._logprobs: dict[int, list[dict[str, Any]]] = {}
        self._pending_logprobs: list[dict[str, Any]] = []
        self._finish_reason: FinishReason | None = None
        self._events_sent = 0

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the whole response object."""
        for delta in deltas:
            for _ in self._item_events(delta):
                pass
        return self._response(self._end_status())

    def events(self, delta: Delta) -> bytes:
        """Return the events of one delta; the first delta also opens the response, and the last one ends it."""
        encoded = (
            b""
            if self._events_sent
            else self._encode_events([self._lifecycle_event("created"), self._lifecycle_event(IN_PROGRESS)])
        )
        encoded += self._encode_events(self._item_events(delta))
        if self._finish_reason is not None:
            encoded += self._encode_events([self._lifecycle_event(self._end_status())])
        return encoded

    def final_events(self) -> bytes:
        """Return no bytes, because the events of the last delta have ended the response."""
        return b""

    def error_events(self, error: ApiError) -> bytes:
        """Return the events `error` and `response.failed`."""
        error_fields = {"code": error.code, "message": error.message, "param": error.param}
        response = self._response(FAILED) | {"error": {"code": "server_error", "message": error.message}}
        return self._encode_events([("error", error_fields), ("response.failed", {"response": response})])

    def _encode_events(self, named_events: Iterator[NamedEvent] | Sequence[NamedEvent]) -> bytes:
        encoded = []
        for name, data in named_events:
            encoded.append(sse_event({"type": name, **data, "sequence_number": self._events_sent}, name))
            self._events_sent += 1
        return b"".join(encoded)

    def _lifecycle_event(self, status: str) -> NamedEvent:
        return f"response.{status}", {"response": self._response(IN_PROGRESS if status == "created" else status)}

    def _end_status(self) -> str:
        return INCOMPLETE if self._finish_reason == "length" else COMPLETED

    def _item_events(self, delta: Delta) -> Iterator[NamedEvent]:
        """Yield the events about output items that one delta causes."""
        if self._wants_logprobs and delta.logprobs:
            self._buffer_logprobs(delta)
        for change in self._sections.add(delta.events):
            yield from self._change_events(change)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            for change in self._sections.end():
                yield from self._change_events(change)

    def _change_events(self, change: SectionEvent) -> Iterator[NamedEvent]:
        if isinstance(change, SectionStarted):
            return self._opening_events(change.section)
        return self._delta_events(change) if isinstance(change, SectionDelta) else self._closing_events(change.section)

    def _opening_events(self, section: Section) -> Iterator[NamedEvent]:
        item = self._item(section, IN_PROGRESS)
        if section.kind != "call":
            item["content"] = []
        yield "response.output_item.added", {"output_index": section.index, "item": item}
        if section.kind != "call":
            yield "response.content_part.added", self._part_position(section) | {"part": self._content_part(section)}

    def _delta_events(self, change: SectionDelta) -> Iterator[NamedEvent]:
        section, delta = change.section, {"delta": change.text}
        if section.kind == "call":
            if name := CALL_EVENTS.get(self._client_tool(section).kind):
                yield f"{name}.delta", self._item_position(section) | delta
        elif section.kind == "reasoning":
            yield "response.reasoning_text.delta", self._part_position(section) | delta
        else:
            yield (
                "response.output_text.delta",
                self._part_position(section) | delta | {"logprobs": self._take_logprobs(section)},
            )

    def _closing_events(self, section: Section) -> Iterator[NamedEvent]:
        if section.kind == "call":
            tool_kind = self._client_tool(section).kind
            if name := CALL_EVENTS.get(tool_kind):
                arguments_field = "input" if tool_kind == "custom" else "arguments"
                yield f"{name}.done", self._item_position(section) | {arguments_field: section.text}
        elif section.kind == "reasoning":
            yield "response.reasoning_text.done", self._part_position(section) | {"text": section.text}
        else:
            if logprobs := self._take_logprobs(section):  # logprobs of tokens without text, such as a stop token
                yield (
                    "response.output_text.delta",
                    self._part_position(section) | {"delta": "", "logprobs": logprobs},
                )
            done_fields = {"text": section.text, "logprobs": self._logprobs.get(section.index, [])}
            yield "response.output_text.done", self._part_position(section) | done_fields
        if section.kind != "call":
            yield "response.content_part.done", self._part_position(section) | {"part": self._content_part(section)}
        item = self._item(section, self._status_of(section))
        yield "response.output_item.done", {"output_index": section.index, "item": item}

    def _item_position(self, section: Section) -> dict[str, Any]:
        return {"item_id": self._item_id(section), "output_index": section.index}

    def _part_position(self, section: Section) -> dict[str, Any]:
        return {**self._item_position(section), "content_index": 0}

    def _item_id(self, section: Section) -> str:
        prefix_key = self._client_tool(section).kind if section.kind == "call" else section.kind
        return f"{ITEM_ID_PREFIXES[prefix_key]}_{self._id.removeprefix('resp_')}_{section.index}"

    def _client_tool(self, section: Section) -> ClientTool:
        """Return the kind and the name by which the client knows the called tool. A call of an unknown name counts as a
        call of a function.
        """
        return self._client_tools.get(section.name) or ClientTool("function", section.name)

    def _status_of(self, section: Section) -> str:
        """Return the status of an ended item. The last item is incomplete if the answer reached its token limit."""
        is_cut_off = self._finish_reason == "length" and section is self._sections.sections[-1]
        return INCOMPLETE if is_cut_off else COMPLETED

    def _content_part(self, section: Section) -> dict[str, Any]:
        part: dict[str, Any] = {"type": PART_TYPES[section.kind], "text": section.text}
        if section.kind == "text":
            part |= {"annotations": [], "logprobs": list(self._logprobs.get(section.index, []))}
        return part

    def _item(self, section: Section, status: str) -> dict[str, Any]:
        identity = {"id": self._item_id(section), "status": status}
        if section.kind == "call":
            return self._call_item(section, identity)
        if section.kind == "reasoning":
            return {"type": "reasoning", **identity, "summary": [], "content": [self._content_part(section)]}
        return {"type": "message", **identity, "role": "assistant", "content": [self._content_part(section)]}

    def _call_item(self, section: Section, identity: dict[str, Any]) -> dict[str, Any]:
        """Return the output item for a call. The kind of the client's tool decides the type of the item."""
        client_tool = self._client_tool(section)
        if client_tool.kind == "tool_search":
            arguments = try_parse_json(section.text) if section.text else {}
            call_fields = {"call_id": section.call_id, "execution": "client", "arguments": arguments}
            return {"type": "tool_search_call", **identity, **call_fields}
        item_type, arguments_field = (
            ("custom_tool_call", "input") if client_tool.kind == "custom" else ("function_call", "arguments")
        )
        namespace = {} if client_tool.namespace is None else {"namespace": client_tool.namespace}
        return {
            "type": item_type,
            **identity,
            "call_id": section.call_id,
            "name": client_tool.name,
            arguments_field: section.text,
            **namespace,
        }

    def _buffer_logprobs(self, delta: Delta) -> None:
        """Keep the log-probabilities of a delta until its text comes. Drop log-probabilities of reasoning and calls."""
        if delta.events and not any(isinstance(event, TextPiece) for event in delta.events):
            self._pending_logprobs = []
            return
        self._pending_logprobs += [logprob_entry(entry, self._token_text) for entry in delta.logprobs]

    def _take_logprobs(self, section: Section) -> list[dict[str, Any]]:
        pending, self._pending_logprobs = self._pending_logprobs, []
        if pending:
            self._logprobs.setdefault(section.index, []).extend(pending)
        return pending

    def _token_text(self, token_id: int) -> tuple[str, bytes]:
        tokenizer = self._tokenizer
        assert tokenizer is not None, "messages are encoded by a tokenizer"
        return tokenizer.token_text(token_id)

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response object. Its `output` is empty and its `usage` null until the response has ended."""
        is_finished = status in (COMPLETED, INCOMPLETE)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "status": status,
            "model": self._model,
            "output": [self._item(section, self._status_of(section)) for section in self._sections.sections]
            if is_finished
            else [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "usage": self._usage() if is_finished else None,
            **self._request_fields,
        }

    def _usage(self) -> dict[str, Any]:
        call_usage = usage(self._choices)
        return {
            "input_tokens": call_usage["prompt_tokens"],
            "input_tokens_details": {**call_usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": call_usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": call_usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": call_usage["total_tokens"],
        }


def repeated_fields(request: ResponseRequest) -> dict[str, Any]:
    """Return the fields that a response repeats from its request. Fields that the client left out have their defaults.
    Fields that this server does not honour have fixed values.
    """
    tool_choice = request.tool_choice
    text_format = request.text.format
    effort = request.reasoning.effort if request.reasoning else None
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata,
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": request.reasoning.summary if request.reasoning else None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "background": False,
        "text": {"format": text_format or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": tool_choice if isinstance(tool_choice, str) else tool_choice.model_dump(exclude_none=True),
        "tools": [tool.model_dump(exclude_none=isinstance(tool, UnsupportedTool)) for tool in request.tools],
        "top_logprobs": request.top_logprobs,
        "truncation": "disabled",
        "user": request.user,
    }


def read_response(service: ServedModel, limits: RequestLimits, body: Mapping[str, Any]) -> CoreRequest:
    """Read a body of /v1/responses."""
    request, warnings = ResponseRequest.read(body)
    chat, origins = request.to_checked_chat(service, limits)
    warnings += [
        *map(origins.translate_warning, unsupported_tool_warnings(chat.tools)),
        *request.ignored_item_warnings(),
    ]
    return CoreRequest(chat, warnings, "resp_", partial(ResponseFormatter, request), origins)
