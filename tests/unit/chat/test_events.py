"""`Sections` turns events into sections: no text is lost or moved, and one section is open at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.chat.events import (
    CallArguments,
    CallStarted,
    Event,
    ReasoningPiece,
    Section,
    SectionDelta,
    SectionEnded,
    SectionEvent,
    Sections,
    SectionStarted,
    TextPiece,
)
from tests.unit.chat.random_answers import answers


def changes(sections: Sections, events: list[Event], events_per_add: int = 1) -> list[SectionEvent]:
    section_events: list[SectionEvent] = []
    for at in range(0, len(events), events_per_add):
        section_events += sections.add(events[at : at + events_per_add])
    return [*section_events, *sections.end()]


def outline(sections: list[Section]) -> list[tuple[str, str, str, str]]:
    return [(section.kind, section.call_id, section.name, section.text) for section in sections]


def test_sections_follow_an_answer_with_all_event_kinds() -> None:
    sections = Sections()
    events: list[Event] = [
        ReasoningPiece("let "), ReasoningPiece("me"), TextPiece("I"), TextPiece(" look"),
        CallStarted(0, "a", "find"), CallArguments(0, '{"x"'), CallArguments(0, ":1}"),
        CallStarted(1, "b", "stop"), TextPiece("!"),
    ]  # fmt: skip
    section_events = changes(sections, events)
    assert outline(sections.sections) == [
        ("reasoning", "", "", "let me"),
        ("text", "", "", "I look"),
        ("call", "a", "find", '{"x":1}'),
        ("call", "b", "stop", ""),
        ("text", "", "", "!"),
    ]
    assert [(type(change).__name__, change.section.index) for change in section_events] == [
        ("SectionStarted", 0), ("SectionDelta", 0), ("SectionDelta", 0), ("SectionEnded", 0),
        ("SectionStarted", 1), ("SectionDelta", 1), ("SectionDelta", 1), ("SectionEnded", 1),
        ("SectionStarted", 2), ("SectionDelta", 2), ("SectionDelta", 2), ("SectionEnded", 2),
        ("SectionStarted", 3), ("SectionEnded", 3), ("SectionStarted", 4), ("SectionDelta", 4), ("SectionEnded", 4),
    ]  # fmt: skip
    assert sections.has_calls


@settings(max_examples=200, deadline=None)
@given(events=answers(), events_per_add=st.integers(1, 4))
def test_section_deltas_add_up_to_the_final_sections(events: list[Event], events_per_add: int) -> None:
    sections = Sections()
    opened: list[Section] = []
    texts: list[str] = []
    closed = 0
    for change in changes(sections, events, events_per_add):
        if isinstance(change, SectionStarted):
            assert closed == len(opened), "the previous section is closed"
            opened.append(change.section)
            texts.append("")
        elif isinstance(change, SectionDelta):
            assert change.text and change.section is opened[-1] and closed < len(opened)
            texts[-1] += change.text
        else:
            assert isinstance(change, SectionEnded) and change.section is opened[-1]
            closed += 1
    assert opened == sections.sections and closed == len(opened) >= 1
    assert texts == [section.text for section in sections.sections]
    for kind, event_class in (("text", TextPiece), ("reasoning", ReasoningPiece), ("call", CallArguments)):
        full_text = "".join(event.text for event in events if isinstance(event, event_class))
        assert "".join(section.text for section in sections.sections if section.kind == kind) == full_text
    started_calls = [(event.call_id, event.name) for event in events if isinstance(event, CallStarted)]
    assert [(section.call_id, section.name) for section in sections.sections if section.kind == "call"] == started_calls


def test_answer_without_text_becomes_one_empty_text_section() -> None:
    sections = Sections()
    assert [type(change) for change in changes(sections, [TextPiece(""), ReasoningPiece("")])] == [
        SectionStarted,
        SectionEnded,
    ]
    assert outline(sections.sections) == [("text", "", "", "")]


@pytest.mark.parametrize("before", [[], [CallStarted(0, "a", "f"), TextPiece("x")], [CallStarted(1, "a", "f")]])
def test_call_arguments_without_a_started_call_raise_value_error(before: list[Event]) -> None:
    sections = Sections()
    list(sections.add(before))
    with pytest.raises(ValueError, match="arguments of call 0"):
        list(sections.add([CallArguments(0, "{}")]))
