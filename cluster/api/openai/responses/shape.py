"""Reads bodies of the Responses API, and writes its answers."""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from cluster.api.core.adapter import CoreRequest, GenerateCall
from cluster.api.core.errors import ApiError
from cluster.api.core.limits import RequestLimits
from cluster.api.core.sequences import Delta, usage
from cluster.api.core.service import Served
from cluster.api.core.tools import LeftOutTool, left_out_warnings
from cluster.api.core.wire import ALIVE, event
from cluster.api.openai.answers import logprob_entry
from cluster.api.openai.responses.request import ResponseRequest
from cluster.api.openai.responses.tools import Own
from cluster.chat.blocks import loaded
from cluster.chat.events import Change, Grown, Opened, Section, Sections, TextPiece
from cluster.request import FinishReason

Sent = tuple[str, dict[str, Any]]
ITEM_IDS = {"said": "msg", "thought": "rs", "function": "fc", "custom": "ctc", "tool_search": "tsc"}
CALL_EVENTS = {"function": "response.function_call_arguments", "custom": "response.custom_tool_call_input"}
PARTS = {"said": "output_text", "thought": "reasoning_text"}
IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"


class ResponseShape:
    """One response. Texts become message items, reasoning becomes reasoning items, calls become call items, in order.

    The response repeats fields of the request, and has `temperature` and `top_p` with their defaults filled in.
    """

    alive = ALIVE

    def __init__(self, asked: ResponseRequest, about: GenerateCall) -> None:
        # Not `about` itself: it refers to this shape, and such a cycle would keep long prompts in memory.
        self._id, self._model, self._choices = about.call_id, about.model, about.choices
        self._tokenizer, self._created = about.tokenizer, about.created
        chat = about.asked.fields
        self._repeated = repeated(asked) | {"temperature": chat.temperature, "top_p": chat.top_p}
        self._names = asked.offered.names
        self._wants_logprobs = asked.wants_logprobs
        self._sections = Sections(about.shows_reasoning)
        self._logprobs: dict[int, list[dict[str, Any]]] = {}
        self._waiting: list[dict[str, Any]] = []
        self._finish: FinishReason | None = None
        self._sent = 0

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the whole response object."""
        for delta in deltas:
            for _ in self._changed(delta):
                pass
        return self._response(self._end_status())

    def events(self, delta: Delta) -> bytes:
        """Return the events of one delta; the first delta also opens the response, and the last one ends it."""
        made = b"" if self._sent else self._framed([self._lifecycle("created"), self._lifecycle(IN_PROGRESS)])
        made += self._framed(self._changed(delta))
        if self._finish is not None:
            made += self._framed([self._lifecycle(self._end_status())])
        return made

    def end(self) -> bytes:
        """Return nothing: `events` of the last delta has ended the response."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """Return the events `error` and `response.failed`."""
        told = {"code": error.code, "message": error.message, "param": error.param}
        response = self._response(FAILED) | {"error": {"code": "server_error", "message": error.message}}
        return self._framed([("error", told), ("response.failed", {"response": response})])

    def _framed(self, sent: Iterator[Sent] | Sequence[Sent]) -> bytes:
        made = []
        for name, data in sent:
            made.append(event({"type": name, **data, "sequence_number": self._sent}, name))
            self._sent += 1
        return b"".join(made)

    def _lifecycle(self, status: str) -> Sent:
        return f"response.{status}", {"response": self._response(IN_PROGRESS if status == "created" else status)}

    def _end_status(self) -> str:
        return INCOMPLETE if self._finish == "length" else COMPLETED

    def _changed(self, delta: Delta) -> Iterator[Sent]:
        """Yield the events about output items that one delta causes."""
        if self._wants_logprobs and delta.logprobs:
            self._wait(delta)
        for change in self._sections.take(delta.events):
            yield from self._told(change)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            for change in self._sections.end():
                yield from self._told(change)

    def _told(self, change: Change) -> Iterator[Sent]:
        if isinstance(change, Opened):
            return self._opened(change.section)
        return self._grown(change) if isinstance(change, Grown) else self._closed(change.section)

    def _opened(self, section: Section) -> Iterator[Sent]:
        item = self._item(section, IN_PROGRESS)
        if section.kind != "call":
            item["content"] = []
        yield "response.output_item.added", {"output_index": section.index, "item": item}
        if section.kind != "call":
            yield "response.content_part.added", self._at_part(section) | {"part": self._part(section)}

    def _grown(self, change: Grown) -> Iterator[Sent]:
        section, delta = change.section, {"delta": change.text}
        if section.kind == "call":
            if name := CALL_EVENTS.get(self._own(section).kind):
                yield f"{name}.delta", self._at(section) | delta
        elif section.kind == "thought":
            yield "response.reasoning_text.delta", self._at_part(section) | delta
        else:
            yield "response.output_text.delta", self._at_part(section) | delta | {"logprobs": self._due(section)}

    def _closed(self, section: Section) -> Iterator[Sent]:
        if section.kind == "call":
            kind = self._own(section).kind
            if name := CALL_EVENTS.get(kind):
                given = "input" if kind == "custom" else "arguments"
                yield f"{name}.done", self._at(section) | {given: section.text}
        elif section.kind == "thought":
            yield "response.reasoning_text.done", self._at_part(section) | {"text": section.text}
        else:
            if due := self._due(section):  # log-probabilities of tokens without text, such as a stop token
                yield "response.output_text.delta", self._at_part(section) | {"delta": "", "logprobs": due}
            done = {"text": section.text, "logprobs": self._logprobs.get(section.index, [])}
            yield "response.output_text.done", self._at_part(section) | done
        if section.kind != "call":
            yield "response.content_part.done", self._at_part(section) | {"part": self._part(section)}
        item = self._item(section, self._status_of(section))
        yield "response.output_item.done", {"output_index": section.index, "item": item}

    def _at(self, section: Section) -> dict[str, Any]:
        return {"item_id": self._item_id(section), "output_index": section.index}

    def _at_part(self, section: Section) -> dict[str, Any]:
        return {**self._at(section), "content_index": 0}

    def _item_id(self, section: Section) -> str:
        kind = self._own(section).kind if section.kind == "call" else section.kind
        return f"{ITEM_IDS[kind]}_{self._id.removeprefix('resp_')}_{section.index}"

    def _own(self, section: Section) -> Own:
        """Return the client's name and kind of the called tool. An unknown name counts as a function."""
        return self._names.get(section.name) or Own("function", section.name)

    def _status_of(self, section: Section) -> str:
        """Return the status of a finished item. The last item is incomplete if the answer reached its token limit."""
        cut = self._finish == "length" and section is self._sections.all[-1]
        return INCOMPLETE if cut else COMPLETED

    def _part(self, section: Section) -> dict[str, Any]:
        part: dict[str, Any] = {"type": PARTS[section.kind], "text": section.text}
        if section.kind == "said":
            part |= {"annotations": [], "logprobs": list(self._logprobs.get(section.index, []))}
        return part

    def _item(self, section: Section, status: str) -> dict[str, Any]:
        head = {"id": self._item_id(section), "status": status}
        if section.kind == "call":
            return self._call(section, head)
        if section.kind == "thought":
            return {"type": "reasoning", **head, "summary": [], "content": [self._part(section)]}
        return {"type": "message", **head, "role": "assistant", "content": [self._part(section)]}

    def _call(self, section: Section, head: dict[str, Any]) -> dict[str, Any]:
        """Return the item of a call, by the kind of the client's tool."""
        own = self._own(section)
        if own.kind == "tool_search":
            arguments = loaded(section.text) if section.text else {}
            called = {"call_id": section.call_id, "execution": "client", "arguments": arguments}
            return {"type": "tool_search_call", **head, **called}
        item, given = ("custom_tool_call", "input") if own.kind == "custom" else ("function_call", "arguments")
        space = {} if own.namespace is None else {"namespace": own.namespace}
        return {"type": item, **head, "call_id": section.call_id, "name": own.name, given: section.text, **space}

    def _wait(self, delta: Delta) -> None:
        """Keep the log-probabilities of a delta until its text comes. Drop log-probabilities of reasoning and calls."""
        if delta.events and not any(isinstance(one, TextPiece) for one in delta.events):
            self._waiting = []
            return
        self._waiting += [logprob_entry(entry, self._token) for entry in delta.logprobs]

    def _due(self, section: Section) -> list[dict[str, Any]]:
        due, self._waiting = self._waiting, []
        if due:
            self._logprobs.setdefault(section.index, []).extend(due)
        return due

    def _token(self, token_id: int) -> tuple[str, bytes]:
        tokenizer = self._tokenizer
        assert tokenizer is not None, "messages are encoded by a tokenizer"
        return tokenizer.token_text(token_id)

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response object. Only a completed or incomplete response has `output` and `usage`."""
        over = status in (COMPLETED, INCOMPLETE)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "status": status,
            "model": self._model,
            "output": [self._item(section, self._status_of(section)) for section in self._sections.all] if over else [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "usage": self._usage() if over else None,
            **self._repeated,
        }

    def _usage(self) -> dict[str, Any]:
        used = usage(self._choices)
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": used["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": used["total_tokens"],
        }


def repeated(asked: ResponseRequest) -> dict[str, Any]:
    """Return the fields that a response repeats from its request. Missing fields have their defaults."""
    choice = asked.tool_choice
    form = asked.text.format
    effort = asked.reasoning.effort if asked.reasoning else None
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "metadata": asked.metadata,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "previous_response_id": None,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": asked.reasoning.summary if asked.reasoning else None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": False,
        "background": False,
        "text": {"format": form or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "tools": [tool.model_dump(exclude_none=isinstance(tool, LeftOutTool)) for tool in asked.tools],
        "top_logprobs": asked.top_logprobs,
        "truncation": "disabled",
        "user": asked.user,
    }


def read_response(service: Served, limits: RequestLimits, body: Mapping[str, Any]) -> CoreRequest:
    """Read a body of /v1/responses."""
    request, warnings = ResponseRequest.read(body)
    chat, origins = request.checked(service, limits)
    warnings += [*map(origins.reworded, left_out_warnings(chat.tools)), *request.said_beside()]
    return CoreRequest(chat, warnings, "resp_", partial(ResponseShape, request), origins)
