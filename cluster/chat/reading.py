"""Reads an answer as it comes: text, thought before it, calls of tools in it. Knows no family; see `formats/`.

A call is told when it is complete and well formed, all of its arguments at once: only then can nothing that comes later
take it back. What begins as a call and is none, or is cut off, is text. White space at the border of a thought or a
call belongs to the format and is left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.chat.events import CallArguments, CallBegun, Event, ReasoningPiece, TextPiece

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the arguments, by the name of the tool."""


@dataclass(frozen=True, slots=True)
class ToolCallText:
    """A call as it was written; `arguments` are the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class BlockResult:
    """What a block is: its calls, none if it is malformed. It ends at `end`; each of `closing` may follow."""

    end: int
    calls: Sequence[ToolCallText] = ()
    closing: Sequence[str] = ()


class BlockReader(Protocol):
    """Reads one block, which begins with a trigger and grows."""

    def read(self, text: str) -> BlockResult | None:
        """What the block is; None while that is open. `text` is the last one, or longer."""
        ...


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """How a family marks what it thinks before it answers."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class CallingMarks:
    """How a family calls tools: what begins a block of calls, and who reads it. `first`: only where nothing is said
    yet, perhaps after some of the characters `skipped`.
    """

    triggers: tuple[str, ...]
    block: Callable[[Tools], BlockReader]
    first: bool = False
    skipped: str = ""


class AnswerReader(Protocol):
    """Turns the text of one answer into events, whatever pieces it comes in."""

    @property
    def thinks(self) -> bool:
        """Whether what comes next is thought."""
        ...

    def push(self, text: str) -> list[Event]:
        """The events that this text completes."""
        ...

    def finish(self) -> list[Event]:
        """The rest, at the end of the answer."""
        ...


class Numbering:
    """Tells calls as events, and numbers them."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._calls = 0

    def events(self, calls: Sequence[ToolCallText]) -> list[Event]:
        """The events of complete calls."""
        found: list[Event] = []
        for call in calls:
            found += [CallBegun(self._calls, self._new_id(), call.name), CallArguments(self._calls, call.arguments)]
            self._calls += 1
        return found


class BufferedReader:
    """What readers share: text is held until a step can tell what it is, and a step says which one comes next."""

    _step: Callable[[bool], list[Event] | None]
    """Takes held text and gives its events; None if it needs more text. The argument says whether none will come."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Event]:
        """The events that this text completes."""
        self._held += text
        return self._all(last=False)

    def finish(self) -> list[Event]:
        """The rest, at the end of the answer."""
        return self._all(last=True)

    def _all(self, last: bool) -> list[Event]:
        """Take steps until one needs more text."""
        found: list[Event] = []
        while (events := self._step(last)) is not None:
            found += events
        return found


class MarkedReader(BufferedReader):
    """The reader of all families that mark thought and calls in running text.

    `thinking` is None where thought is not told apart, `calling` where no tools may be called; `opened`: the prompt has
    begun the thought, `closed`: or ended it.
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
        self._lead = 0  # white space that is held before the block
        self._closing: list[str] = []
        self._fresh = False  # nothing has come since a border, so white space is left out
        self._nothing_said = True
        begins = self._beginning if thinking is not None and not closed else self._said
        self._step = self._thought if thinking is not None and opened else begins

    @property
    def thinks(self) -> bool:
        """Whether what comes next is thought."""
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
        """Whether the answer begins with a trigger."""
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
        """Pass over what closes the block; if it is cut off, over what there is of it."""
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
        """Leave out white space at a border; whether anything else is there."""
        self._held = self._held.lstrip()
        self._fresh = not self._held
        return bool(self._held)

    def _take(self, count: int) -> list[str]:
        text, self._held = self._held[:count], self._held[count:]
        return [text] if text else []


def _settled(text: str, marks: Sequence[str]) -> int:
    """How much of a text neither begins a mark nor is the white space before one."""
    if not marks:
        return len(text)
    at = len(text)
    for mark in marks:
        sizes = range(min(len(mark) - 1, len(text)), 0, -1)
        at = min(at, len(text) - next((size for size in sizes if mark.startswith(text[-size:])), 0))
    return len(text[:at].rstrip())
