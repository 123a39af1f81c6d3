"""Parses an answer while it is generated: its text, the reasoning before it, and the tool calls in it. Independent of
model families; see `formats/`.

A call is reported when it is complete and well formed, with all arguments at once, so that no later text can revoke it.
Text that begins like a call but is malformed or cut off is reported as text. White space next to reasoning or a call
belongs to the format and is dropped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.chat.events import CallArguments, CallBegun, Event, ReasoningPiece, TextPiece

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the tool's name."""


@dataclass(frozen=True, slots=True)
class ToolCallText:
    """A call as the model wrote it; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class BlockResult:
    """A parsed block, which ends at index `end`. `calls` is empty if the block is malformed. The marks `closing` may
    follow the block.
    """

    end: int
    calls: Sequence[ToolCallText] = ()
    closing: Sequence[str] = ()


class BlockReader(Protocol):
    """Parses one block of calls, which begins with a trigger, while it grows."""

    def read(self, text: str) -> BlockResult | None:
        """Return the result, or None while the block is incomplete. `text` may only grow between calls."""
        ...


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The marks before and after a family's reasoning."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class CallingMarks:
    """How a family calls tools. `triggers` are the marks that begin a block of calls; `block` makes the reader of a
    block. If `first` is true, a block may only be at the start of the answer, perhaps after characters in `skipped`.
    """

    triggers: tuple[str, ...]
    block: Callable[[Tools], BlockReader]
    first: bool = False
    skipped: str = ""


class AnswerReader(Protocol):
    """Turns the text of one answer, in pieces of any size, into events."""

    @property
    def thinks(self) -> bool:
        """Whether the next text is reasoning."""
        ...

    def push(self, text: str) -> list[Event]:
        """Return the events that this text completes."""
        ...

    def finish(self) -> list[Event]:
        """Return the remaining events, at the end of the answer."""
        ...


class Numbering:
    """Numbers calls and turns them into events."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._calls = 0

    def events(self, calls: Sequence[ToolCallText]) -> list[Event]:
        """Return the events of complete calls."""
        found: list[Event] = []
        for call in calls:
            found += [CallBegun(self._calls, self._new_id(), call.name), CallArguments(self._calls, call.arguments)]
            self._calls += 1
        return found


class BufferedReader:
    """Base of readers. It holds text until a step (a parsing method) can classify it. A step chooses the next one."""

    _step: Callable[[bool], list[Event] | None]
    """The current step. It consumes held text and returns the events in it, or None if it needs more text. Its argument
    says whether the answer has ended.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Event]:
        """Return the events that this text completes."""
        self._held += text
        return self._all(last=False)

    def finish(self) -> list[Event]:
        """Return the remaining events, at the end of the answer."""
        return self._all(last=True)

    def _all(self, last: bool) -> list[Event]:
        """Run steps until one needs more text."""
        found: list[Event] = []
        while (events := self._step(last)) is not None:
            found += events
        return found


class MarkedReader(BufferedReader):
    """The reader of all families that mark reasoning and calls in running text.

    If `thinking` is None, reasoning is not separated. If `calling` is None, no tools may be called. `opened` says that
    the prompt has begun the reasoning, `closed` that the prompt has ended the reasoning.
    """

    def __init__(
        self,
        thinking: ThinkingMarks | None,
        calling: CallingMarks | None,
        tools: Tools,
        new_id: Callable[[], str],
        *,
        opened: bool = False,
        closed: bool = False,
    ) -> None:
        super().__init__()
        self._thinking, self._calling, self._tools = thinking, calling, tools
        self._numbering = Numbering(new_id)
        self._block: BlockReader | None = None
        self._lead = 0  # length of the white space held before the block
        self._closing: list[str] = []
        self._fresh = False  # the parser is at a border of reasoning or a call: white space is dropped
        self._nothing_said = True
        begins = self._beginning if thinking is not None and not closed else self._said
        self._step = self._thought if thinking is not None and opened else begins

    @property
    def thinks(self) -> bool:
        """Whether the next text is reasoning."""
        return self._step == self._thought

    def _beginning(self, last: bool) -> list[Event] | None:
        assert self._thinking is not None
        text, begin = self._held.lstrip(), self._thinking.begin
        if text.startswith(begin):
            self._held, self._fresh, self._step = text[len(begin) :], True, self._thought
        elif begin.startswith(text) and not last:
            return None
        else:
            self._step = self._said
        return []

    def _thought(self, last: bool) -> list[Event] | None:
        assert self._thinking is not None
        if self._fresh and not self._skip_space():
            return None
        before, end, after = self._held.partition(self._thinking.end)
        if end:
            self._held, self._fresh, self._step = after, True, self._said
            before = before.rstrip()
            return [ReasoningPiece(before)] if before else []
        ready = len(self._held) if last else _settled(self._held, (self._thinking.end,))
        return [ReasoningPiece(text) for text in self._take(ready)] or None

    def _said(self, last: bool) -> list[Event] | None:
        if self._fresh and not self._skip_space():
            return None
        triggers = self._triggers()
        at = min((at for trigger in triggers if (at := self._held.find(trigger)) >= 0), default=-1)
        if self._calling is not None and self._calling.first and triggers:
            return self._first(at, last)
        if at >= 0 and self._calling is not None:
            return self._begin_block(at)
        ready = len(self._held) if last else _settled(self._held, triggers)
        self._nothing_said &= ready == 0
        return [TextPiece(text) for text in self._take(ready)] or None

    def _triggers(self) -> tuple[str, ...]:
        if self._calling is None or (self._calling.first and not self._nothing_said):
            return ()
        return self._calling.triggers

    def _first(self, at: int, last: bool) -> list[Event] | None:
        """Begin a block if the answer starts with a trigger; otherwise treat the rest of the answer as text."""
        assert self._calling is not None
        rest = self._held.lstrip(self._calling.skipped)
        if at >= 0 and at == len(self._held) - len(rest):
            return self._begin_block(at)
        if not last and any(trigger.startswith(rest) for trigger in self._calling.triggers):
            return None
        self._nothing_said = False
        return []

    def _begin_block(self, at: int) -> list[Event]:
        assert self._calling is not None
        text = self._held[:at].rstrip(self._calling.skipped or None)
        self._held, self._lead = self._held[len(text) :], at - len(text)
        self._block, self._step = self._calling.block(self._tools), self._in_block
        self._fresh = False
        return [TextPiece(text)] if text else []

    def _in_block(self, last: bool) -> list[Event] | None:
        assert self._block is not None
        read = self._block.read(self._held[self._lead :])
        if read is None and not last:
            return None
        end = len(self._held) if read is None else self._lead + read.end
        text, self._held = self._held[:end], self._held[end:]
        if read is None or not read.calls:
            self._nothing_said, self._step = False, self._said
            return [TextPiece(text)]
        self._closing, self._step = list(read.closing), self._closed
        return self._numbering.events(read.calls)

    def _closed(self, last: bool) -> list[Event] | None:
        """Skip the marks that close the block. At the end of the answer, also skip a mark that is cut off."""
        while self._closing:
            text, end = self._held.lstrip(), self._closing[0]
            if not text.startswith(end) and any(one != text and one.startswith(text) for one in self._closing):
                if not last:
                    return None
                text = ""
            self._held = text.removeprefix(end) if text.startswith(end) or not text else self._held
            self._closing.pop(0)
        self._fresh, self._step = True, self._said
        return []

    def _skip_space(self) -> bool:
        """Drop white space at a border, and return whether other text follows."""
        self._held = self._held.lstrip()
        self._fresh = not self._held
        return bool(self._held)

    def _take(self, count: int) -> list[str]:
        text, self._held = self._held[:count], self._held[count:]
        return [text] if text else []


def _settled(text: str, marks: Sequence[str]) -> int:
    """Return the length of the text that can be reported: all but a possible mark and white space at its end."""
    if not marks:
        return len(text)
    at = len(text)
    for mark in marks:
        sizes = range(min(len(mark) - 1, len(text)), 0, -1)
        at = min(at, len(text) - next((size for size in sizes if mark.startswith(text[-size:])), 0))
    return len(text[:at].rstrip())
