"""Events become sections: nothing is lost, nothing is moved, and one section is open at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.chat.events import (
    CallArguments,
    CallBegun,
    Change,
    Closed,
    Event,
    Grown,
    Opened,
    ReasoningPiece,
    Section,
    Sections,
    TextPiece,
)
from tests.unit.chat.random_answers import answers


def changes(sections: Sections, events: list[Event], cuts: int = 1) -> list[Change]:
    found: list[Change] = []
    for at in range(0, len(events), cuts):
        found += sections.take(events[at : at + cuts])
    return [*found, *sections.end()]


def outline(sections: list[Section]) -> list[tuple[str, str, str, str]]:
    return [(section.kind, section.call_id, section.name, section.text) for section in sections]


def test_an_answer_of_all_kinds() -> None:
    sections = Sections()
    events: list[Event] = [
        ReasoningPiece("let "), ReasoningPiece("me"), TextPiece("I"), TextPiece(" look"),
        CallBegun(0, "a", "find"), CallArguments(0, '{"x"'), CallArguments(0, ":1}"),
        CallBegun(1, "b", "stop"), TextPiece("!"),
    ]  # fmt: skip
    found = changes(sections, events)
    assert outline(sections.all) == [
        ("thought", "", "", "let me"),
        ("said", "", "", "I look"),
        ("call", "a", "find", '{"x":1}'),
        ("call", "b", "stop", ""),
        ("said", "", "", "!"),
    ]
    assert [(type(change).__name__, change.section.index) for change in found] == [
        ("Opened", 0), ("Grown", 0), ("Grown", 0), ("Closed", 0),
        ("Opened", 1), ("Grown", 1), ("Grown", 1), ("Closed", 1),
        ("Opened", 2), ("Grown", 2), ("Grown", 2), ("Closed", 2),
        ("Opened", 3), ("Closed", 3), ("Opened", 4), ("Grown", 4), ("Closed", 4),
    ]  # fmt: skip
    assert sections.has_calls


@settings(max_examples=200, deadline=None)
@given(events=answers(), cuts=st.integers(1, 4))
def test_what_grows_is_what_is_there_at_the_end(events: list[Event], cuts: int) -> None:
    sections = Sections()
    opened: list[Section] = []
    texts: list[str] = []
    closed = 0
    for change in changes(sections, events, cuts):
        if isinstance(change, Opened):
            assert closed == len(opened), "the one before is closed"
            opened.append(change.section)
            texts.append("")
        elif isinstance(change, Grown):
            assert change.text and change.section is opened[-1] and closed < len(opened)
            texts[-1] += change.text
        else:
            assert isinstance(change, Closed) and change.section is opened[-1]
            closed += 1
    assert opened == sections.all and closed == len(opened) >= 1
    assert texts == [section.text for section in sections.all]
    for kind, of in (("said", TextPiece), ("thought", ReasoningPiece), ("call", CallArguments)):
        whole = "".join(event.text for event in events if isinstance(event, of))
        assert "".join(section.text for section in sections.all if section.kind == kind) == whole
    begun = [(event.call_id, event.name) for event in events if isinstance(event, CallBegun)]
    assert [(section.call_id, section.name) for section in sections.all if section.kind == "call"] == begun


def test_an_answer_without_events_is_an_empty_text() -> None:
    sections = Sections()
    assert [type(change) for change in changes(sections, [TextPiece(""), ReasoningPiece("")])] == [Opened, Closed]
    assert outline(sections.all) == [("said", "", "", "")]


@pytest.mark.parametrize("before", [[], [CallBegun(0, "a", "f"), TextPiece("x")], [CallBegun(1, "a", "f")]])
def test_arguments_without_their_call_are_an_error(before: list[Event]) -> None:
    sections = Sections()
    list(sections.take(before))
    with pytest.raises(ValueError, match="arguments of call 0"):
        list(sections.take([CallArguments(0, "{}")]))
