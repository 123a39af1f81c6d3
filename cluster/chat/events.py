"""The events of an answer, except its end, independent of any API. Every API builds its answer from them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """A piece of the reasoning that a model writes before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool. `call` numbers the calls of an answer from 0; `call_id` is unique in the conversation.
    The input of a `custom` tool is a text, not a JSON object.
    """

    call: int
    call_id: str
    name: str
    custom: bool = False


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the input of call number `call`. The input is JSON arguments, or the text of a custom tool."""

    call: int
    text: str


Event = TextPiece | ReasoningPiece | CallBegun | CallArguments

Kind = Literal["said", "thought", "call"]


@dataclass(slots=True)
class Section:
    """One section; `index` numbers the sections of an answer from 0. `call_id` and `name` are set for a call only."""

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The content so far: text, reasoning, the JSON arguments of a call, or the text of a custom tool."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    """A section begins. The previous section is already closed."""

    section: Section


@dataclass(frozen=True, slots=True)
class Grown:
    """A section got more text."""

    section: Section
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A section is complete."""

    section: Section


Change = Opened | Grown | Closed


class Sections:
    """Groups events, in their order, into sections. Consecutive pieces of one kind form one section; each call is a
    section of its own. If `thought` is false, reasoning is left out.
    """

    def __init__(self, thought: bool = True) -> None:
        self._thought = thought
        self.all: list[Section] = []
        self._open: Section | None = None
        self._call = -1

    @property
    def has_calls(self) -> bool:
        """Whether the answer calls a tool."""
        return any(section.kind == "call" for section in self.all)

    def take(self, events: Sequence[Event]) -> Iterator[Change]:
        """Yield the changes that the next events make.

        Raises:
            ValueError: arguments belong to a call other than the last call begun.
        """
        for event in events:
            if isinstance(event, ReasoningPiece) and not self._thought:
                continue
            if isinstance(event, CallBegun):
                self._call = event.call
                yield from self._begin("call", event.call_id, event.name)
            elif isinstance(event, CallArguments):
                if self._open is None or self._open.kind != "call" or self._call != event.call:
                    raise ValueError(f"arguments of call {event.call} come after it has ended")
                yield from self._grow(event.text)
            else:
                kind: Kind = "said" if isinstance(event, TextPiece) else "thought"
                if event.text and (self._open is None or self._open.kind != kind):
                    yield from self._begin(kind)
                yield from self._grow(event.text)

    def end(self) -> Iterator[Change]:
        """End the answer: close the open section. An answer without sections gets one empty text."""
        if not self.all:
            yield from self._begin("said")
        yield from self._close()

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Change]:
        yield from self._close()
        self._open = Section(len(self.all), kind, call_id, name)
        self.all.append(self._open)
        yield Opened(self._open)

    def _grow(self, text: str) -> Iterator[Change]:
        if text and self._open is not None:
            self._open.pieces.append(text)
            yield Grown(self._open, text)

    def _close(self) -> Iterator[Change]:
        if self._open is not None:
            yield Closed(self._open)
        self._open = None
