"""Events become blocks: nothing is lost, nothing is moved, and one block is open at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.chat.blocks import Block, Blocks, Change, Closed, Grown, Opened
from cluster.chat.events import Arguments, CallBegun, Event, Said, Thought
from tests.unit.chat.random_answers import answers


def changes(blocks: Blocks, events: list[Event], cuts: int = 1) -> list[Change]:
    found: list[Change] = []
    for at in range(0, len(events), cuts):
        found += blocks.take(events[at : at + cuts])
    return [*found, *blocks.end()]


def outline(blocks: list[Block]) -> list[tuple[str, str, str, str]]:
    return [(block.kind, block.call_id, block.name, block.text) for block in blocks]


def test_an_answer_of_all_kinds() -> None:
    blocks = Blocks()
    events: list[Event] = [
        Thought("let "), Thought("me"), Said("I"), Said(" look"),
        CallBegun(0, "a", "find"), Arguments(0, '{"x"'), Arguments(0, ":1}"), CallBegun(1, "b", "stop"), Said("!"),
    ]  # fmt: skip
    found = changes(blocks, events)
    assert outline(blocks.all) == [
        ("thought", "", "", "let me"),
        ("said", "", "", "I look"),
        ("call", "a", "find", '{"x":1}'),
        ("call", "b", "stop", ""),
        ("said", "", "", "!"),
    ]
    assert [(type(change).__name__, change.block.index) for change in found] == [
        ("Opened", 0), ("Grown", 0), ("Grown", 0), ("Closed", 0),
        ("Opened", 1), ("Grown", 1), ("Grown", 1), ("Closed", 1),
        ("Opened", 2), ("Grown", 2), ("Grown", 2), ("Closed", 2),
        ("Opened", 3), ("Closed", 3), ("Opened", 4), ("Grown", 4), ("Closed", 4),
    ]  # fmt: skip
    assert blocks.has_calls


@settings(max_examples=200, deadline=None)
@given(events=answers(), cuts=st.integers(1, 4))
def test_what_grows_is_what_is_there_at_the_end(events: list[Event], cuts: int) -> None:
    blocks = Blocks()
    opened: list[Block] = []
    texts: list[str] = []
    closed = 0
    for change in changes(blocks, events, cuts):
        if isinstance(change, Opened):
            assert closed == len(opened), "the one before is closed"
            opened.append(change.block)
            texts.append("")
        elif isinstance(change, Grown):
            assert change.text and change.block is opened[-1] and closed < len(opened)
            texts[-1] += change.text
        else:
            assert isinstance(change, Closed) and change.block is opened[-1]
            closed += 1
    assert opened == blocks.all and closed == len(opened) >= 1
    assert texts == [block.text for block in blocks.all]
    for kind, of in (("said", Said), ("thought", Thought), ("call", Arguments)):
        whole = "".join(event.text for event in events if isinstance(event, of))
        assert "".join(block.text for block in blocks.all if block.kind == kind) == whole
    begun = [(event.call_id, event.name) for event in events if isinstance(event, CallBegun)]
    assert [(block.call_id, block.name) for block in blocks.all if block.kind == "call"] == begun


def test_an_answer_without_events_is_an_empty_text() -> None:
    blocks = Blocks()
    assert [type(change) for change in changes(blocks, [Said(""), Thought("")])] == [Opened, Closed]
    assert outline(blocks.all) == [("said", "", "", "")]


@pytest.mark.parametrize("before", [[], [CallBegun(0, "a", "f"), Said("x")], [CallBegun(1, "a", "f")]])
def test_arguments_without_their_call_are_an_error(before: list[Event]) -> None:
    blocks = Blocks()
    list(blocks.take(before))
    with pytest.raises(ValueError, match="arguments of call 0"):
        list(blocks.take([Arguments(0, "{}")]))
