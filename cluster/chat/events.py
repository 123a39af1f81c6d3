"""The events of an answer (pieces of text and reasoning, and calls), in a form that belongs to no API. The chat APIs
build their answers from them. No event marks the end of an answer.
"""

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
class CallStarted:
    """The model calls the tool `name`. `call_index` numbers the calls of an answer from 0; `call_id` is unique in the
    conversation. `custom` says that the tool's input is a text, not a JSON object.
    """

    call_index: int
    call_id: str
    name: str
    custom: bool = False


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the input of call number `call_index`. The input is JSON arguments, or the text of a custom tool."""

    call_index: int
    text: str


Event = TextPiece | ReasoningPiece | CallStarted | CallArguments

SectionKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Section:
    """A part of an answer: text, reasoning, or one call. `index` numbers the sections of an answer from 0. `call_id`
    and `name` are set for a call only.
    """

    index: int
    kind: SectionKind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The content so far: text, reasoning, the JSON arguments of a call, or the text of a custom tool."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class SectionStarted:
    """A section begins. The previous section is already closed."""

    section: Section


@dataclass(frozen=True, slots=True)
class SectionDelta:
    """A section got more text."""

    section: Section
    text: str


@dataclass(frozen=True, slots=True)
class SectionEnded:
    """A section is complete."""

    section: Section


SectionEvent = SectionStarted | SectionDelta | SectionEnded


class Sections:
    """Groups events, in their order, into sections. Consecutive pieces of one kind form one section; each call is a
    section of its own. If `include_reasoning` is false, reasoning is left out.
    """

    def __init__(self, include_reasoning: bool = True) -> None:
        self._include_reasoning = include_reasoning
        self.sections: list[Section] = []
        self._open_section: Section | None = None
        self._call_index = -1

    @property
    def has_calls(self) -> bool:
        """Whether the answer calls a tool."""
        return any(section.kind == "call" for section in self.sections)

    def add(self, events: Sequence[Event]) -> Iterator[SectionEvent]:
        """Yield the changes that the next events make.

        Raises:
            ValueError: arguments come for a call whose section is not open.
        """
        for event in events:
            if isinstance(event, ReasoningPiece) and not self._include_reasoning:
                continue
            if isinstance(event, CallStarted):
                self._call_index = event.call_index
                yield from self._begin("call", event.call_id, event.name)
            elif isinstance(event, CallArguments):
                if (
                    self._open_section is None
                    or self._open_section.kind != "call"
                    or self._call_index != event.call_index
                ):
                    raise ValueError(f"arguments of call {event.call_index} come after it has ended")
                yield from self._grow(event.text)
            else:
                kind: SectionKind = "text" if isinstance(event, TextPiece) else "reasoning"
                if event.text and (self._open_section is None or self._open_section.kind != kind):
                    yield from self._begin(kind)
                yield from self._grow(event.text)

    def end(self) -> Iterator[SectionEvent]:
        """End the answer: close the open section. An answer without sections gets one empty text."""
        if not self.sections:
            yield from self._begin("text")
        yield from self._close()

    def _begin(self, kind: SectionKind, call_id: str = "", name: str = "") -> Iterator[SectionEvent]:
        yield from self._close()
        self._open_section = Section(len(self.sections), kind, call_id, name)
        self.sections.append(self._open_section)
        yield SectionStarted(self._open_section)

    def _grow(self, text: str) -> Iterator[SectionEvent]:
        if text and self._open_section is not None:
            self._open_section.pieces.append(text)
            yield SectionDelta(self._open_section, text)

    def _close(self) -> Iterator[SectionEvent]:
        if self._open_section is not None:
            yield SectionEnded(self._open_section)
        self._open_section = None
