"""Parses an answer while it is generated: its text, the reasoning before it, and the tool calls in it. This file knows
no model family; the marks of each family are in `formats/`. A mark is a fixed text that the family writes around
reasoning or calls, such as `<think>`.

A call is reported when it is complete and well formed, with all arguments at once, so that no later text can revoke it.
Text that begins like a call but is malformed or cut off is reported as text. White space next to reasoning or a call
belongs to the format and is dropped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.chat.events import CallArguments, CallStarted, Event, ReasoningPiece, TextPiece

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the tool's name."""


@dataclass(frozen=True, slots=True)
class ToolCallText:
    """A call as the model wrote it; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class BlockResult:
    """A parsed block: text that begins with a trigger (a mark that begins calls) and ends before index `end`. `calls`
    is empty if the block is malformed. The `closing_marks` may follow the block; they are skipped.
    """

    end: int
    calls: Sequence[ToolCallText] = ()
    closing_marks: Sequence[str] = ()


class BlockReader(Protocol):
    """Parses one block of calls while it grows. The block begins with a trigger."""

    def parse(self, text: str) -> BlockResult | None:
        """Return the result, or None while the block is incomplete. `text` is all text from the trigger on, so from one
        call of this method to the next it only grows.
        """
        ...


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The marks before and after a family's reasoning."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class CallingMarks:
    """How a family calls tools. `triggers` are the marks that begin a block of calls; `block_reader` makes the reader
    of a block. If `only_at_start` is true, a block may only be at the start of the answer; only characters in
    `skipped_chars` may come before it.
    """

    triggers: tuple[str, ...]
    block_reader: Callable[[Tools], BlockReader]
    only_at_start: bool = False
    skipped_chars: str = ""


class AnswerReader(Protocol):
    """Turns the text of one answer, in pieces of any size, into events."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        ...

    def push(self, text: str) -> list[Event]:
        """Return the events that this text completes."""
        ...

    def finish(self) -> list[Event]:
        """Return the remaining events, at the end of the answer."""
        ...


class CallNumbering:
    """Numbers calls and turns them into events."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._calls = 0

    def events(self, calls: Sequence[ToolCallText]) -> list[Event]:
        """Return the events of complete calls."""
        numbered_events: list[Event] = []
        for call in calls:
            numbered_events += [
                CallStarted(self._calls, self._new_id(), call.name),
                CallArguments(self._calls, call.arguments),
            ]
            self._calls += 1
        return numbered_events


class BufferedReader:
    """Base of readers. It buffers text until a step (a parsing method) can classify it. Each step chooses the next."""

    _step: Callable[[bool], list[Event] | None]
    """The current step. It consumes buffered text and returns the events in it, or None if it needs more text. Its
    argument `is_final` says whether the answer has ended.
    """

    def __init__(self) -> None:
        self._buffer = ""

    def push(self, text: str) -> list[Event]:
        """Return the events that this text completes."""
        self._buffer += text
        return self._run_steps(is_final=False)

    def finish(self) -> list[Event]:
        """Return the remaining events, at the end of the answer."""
        return self._run_steps(is_final=True)

    def _run_steps(self, is_final: bool) -> list[Event]:
        """Run steps until one needs more text."""
        result: list[Event] = []
        while (events := self._step(is_final)) is not None:
            result += events
        return result


class MarkedReader(BufferedReader):
    """The reader of all families that mark reasoning and calls in running text.

    If `thinking` is None, reasoning is reported as text. If `calling` is None, no tools may be called.
    `reasoning_started` says that the prompt has begun the reasoning, `reasoning_ended` that it has ended the reasoning.
    """

    def __init__(
        self,
        thinking: ThinkingMarks | None,
        calling: CallingMarks | None,
        tools: Tools,
        new_id: Callable[[], str],
        *,
        reasoning_started: bool = False,
        reasoning_ended: bool = False,
    ) -> None:
        super().__init__()
        self._thinking, self._calling, self._tools = thinking, calling, tools
        self._call_numbering = CallNumbering(new_id)
        self._block_reader: BlockReader | None = None
        self._block_offset = 0  # length of the white space before the block in the buffer
        self._closing_marks: list[str] = []
        self._at_boundary = False  # the buffer begins next to reasoning or a call, where white space is dropped
        self._answer_is_empty = True
        first_step = self._parse_start if thinking is not None and not reasoning_ended else self._parse_text
        self._step = self._parse_reasoning if thinking is not None and reasoning_started else first_step

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self._step == self._parse_reasoning

    def _parse_start(self, is_final: bool) -> list[Event] | None:
        assert self._thinking is not None
        text, begin = self._buffer.lstrip(), self._thinking.begin
        if text.startswith(begin):
            self._buffer, self._at_boundary, self._step = text[len(begin) :], True, self._parse_reasoning
        elif begin.startswith(text) and not is_final:
            return None
        else:
            self._step = self._parse_text
        return []

    def _parse_reasoning(self, is_final: bool) -> list[Event] | None:
        assert self._thinking is not None
        if self._at_boundary and not self._skip_space():
            return None
        reasoning, end, remaining = self._buffer.partition(self._thinking.end)
        if end:
            self._buffer, self._at_boundary, self._step = remaining, True, self._parse_text
            reasoning = reasoning.rstrip()
            return [ReasoningPiece(reasoning)] if reasoning else []
        length = len(self._buffer) if is_final else _safe_length(self._buffer, (self._thinking.end,))
        return [ReasoningPiece(text) for text in self._take_text(length)] or None

    def _parse_text(self, is_final: bool) -> list[Event] | None:
        if self._at_boundary and not self._skip_space():
            return None
        triggers = self._triggers()
        position = min((position for trigger in triggers if (position := self._buffer.find(trigger)) >= 0), default=-1)
        if self._calling is not None and self._calling.only_at_start and triggers:
            return self._parse_first_block(position, is_final)
        if position >= 0 and self._calling is not None:
            return self._begin_block(position)
        length = len(self._buffer) if is_final else _safe_length(self._buffer, triggers)
        self._answer_is_empty &= length == 0
        return [TextPiece(text) for text in self._take_text(length)] or None

    def _triggers(self) -> tuple[str, ...]:
        if self._calling is None or (self._calling.only_at_start and not self._answer_is_empty):
            return ()
        return self._calling.triggers

    def _parse_first_block(self, position: int, is_final: bool) -> list[Event] | None:
        """Begin a block if the answer starts with a trigger; otherwise treat the whole answer as text. Return None if
        more text is needed to decide.
        """
        assert self._calling is not None
        stripped = self._buffer.lstrip(self._calling.skipped_chars)
        if position >= 0 and position == len(self._buffer) - len(stripped):
            return self._begin_block(position)
        if not is_final and any(trigger.startswith(stripped) for trigger in self._calling.triggers):
            return None
        self._answer_is_empty = False
        return []

    def _begin_block(self, position: int) -> list[Event]:
        assert self._calling is not None
        text = self._buffer[:position].rstrip(self._calling.skipped_chars or None)
        self._buffer, self._block_offset = self._buffer[len(text) :], position - len(text)
        self._block_reader, self._step = self._calling.block_reader(self._tools), self._parse_block
        self._at_boundary = False
        return [TextPiece(text)] if text else []

    def _parse_block(self, is_final: bool) -> list[Event] | None:
        assert self._block_reader is not None
        result = self._block_reader.parse(self._buffer[self._block_offset :])
        if result is None and not is_final:
            return None
        end = len(self._buffer) if result is None else self._block_offset + result.end
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if result is None or not result.calls:
            self._answer_is_empty, self._step = False, self._parse_text
            return [TextPiece(text)]
        self._closing_marks, self._step = list(result.closing_marks), self._skip_closing_marks
        return self._call_numbering.events(result.calls)

    def _skip_closing_marks(self, is_final: bool) -> list[Event] | None:
        """Skip the marks that close the block. At the end of the answer, also skip a mark that is cut off."""
        while self._closing_marks:
            text, mark = self._buffer.lstrip(), self._closing_marks[0]
            if not text.startswith(mark) and any(
                other != text and other.startswith(text) for other in self._closing_marks
            ):
                if not is_final:
                    return None
                text = ""
            self._buffer = text.removeprefix(mark) if text.startswith(mark) or not text else self._buffer
            self._closing_marks.pop(0)
        self._at_boundary, self._step = True, self._parse_text
        return []

    def _skip_space(self) -> bool:
        """Drop the white space at the start of the buffer, and return whether other text follows."""
        self._buffer = self._buffer.lstrip()
        self._at_boundary = not self._buffer
        return bool(self._buffer)

    def _take_text(self, count: int) -> list[str]:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return [text] if text else []


def _safe_length(text: str, marks: Sequence[str]) -> int:
    """Return how many characters of `text` can be reported before more text comes. If there are `marks`, a partial mark
    and white space at the end must wait.
    """
    return len(text[: length_before_partial_mark(text, marks)].rstrip()) if marks else len(text)


def length_before_partial_mark(text: str, marks: Sequence[str]) -> int:
    """Return the length of `text` without a partial mark at its end, such as `<thi` of `<think>`."""
    length = len(text)
    for mark in marks:
        position = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while position >= 0 and not mark.startswith(text[position:]):
            position = text.find(mark[0], position + 1)
        if position >= 0:
            length = min(length, position)
    return length
