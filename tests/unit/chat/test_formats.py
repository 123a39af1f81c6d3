"""The transcripts of every model family, split anywhere and cut off anywhere: the reader gives the same events and
loses no text.
"""

import json
import random

import pytest

from cluster.chat.events import CallArguments, CallStarted, Event, ReasoningPiece, TextPiece
from tests.unit.chat.transcripts import TOOLS, TRANSCRIPTS, Transcript, merge_events, reader_of


def read_events(transcript: Transcript, pieces: list[str], **options: bool) -> list[Event]:
    reader = reader_of(transcript, **options)
    return [event for piece in pieces for event in reader.push(piece)] + reader.finish()


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_reader_gives_the_same_events_for_any_split_of_the_text(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    text = transcript.text
    for at in range(len(text) + 1):
        assert merge_events(read_events(transcript, [text[:at], text[at:]])) == list(transcript.events), at
    assert merge_events(read_events(transcript, list(text))) == list(transcript.events)
    generator = random.Random(7)
    for _ in range(20):
        cuts = sorted(generator.choices(range(len(text) + 1), k=5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert merge_events(read_events(transcript, pieces)) == list(transcript.events), cuts


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_truncated_answer_gives_complete_calls_and_remaining_text(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    calls = [event for event in transcript.events if event[0] == "call"]
    for at in range(len(transcript.text)):
        cut = transcript.text[:at]
        events = read_events(transcript, list(cut))
        found_calls = [event for event in merge_events(events) if event[0] == "call"]
        assert found_calls == calls[: len(found_calls)], cut
        assert all(isinstance(json.loads(arguments), dict) for _, _, arguments in found_calls)
        search_start = 0
        for event in events:
            if isinstance(event, TextPiece | ReasoningPiece):
                search_start = cut.index(event.text, search_start) + len(event.text)
        text_only = {event[0] for event in (*transcript.events, *merge_events(events))} == {"text"}
        if text_only and not transcript.text.startswith("<|channel|>"):
            assert "".join(event[1] for event in merge_events(events)) == cut, "the events lose no text"


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_reader_never_retracts_emitted_events(name: str) -> None:
    """The events after a part of the text are the first events of the whole text; only the last one may grow later."""
    transcript = TRANSCRIPTS[name]
    final_events = merge_events(read_events(transcript, [transcript.text]))
    reader = reader_of(transcript)
    events: list[Event] = []
    for character in transcript.text:
        events += reader.push(character)
        events_so_far = merge_events(events)
        if events_so_far:
            assert events_so_far[:-1] == final_events[: len(events_so_far) - 1]
            last_event, final_event = events_so_far[-1], final_events[len(events_so_far) - 1]
            assert last_event[0] == final_event[0] and final_event[-1].startswith(last_event[-1])


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_reader_with_calls_disabled_emits_no_call(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    events = merge_events(read_events(transcript, [transcript.text], calls=False))
    assert not [event for event in events if event[0] == "call"]
    for _, _, arguments in (event for event in transcript.events if event[0] == "call"):
        assert any(arguments in event[1] for event in events) or arguments == "{}" or name in REWRITTEN_ARGUMENTS


REWRITTEN_ARGUMENTS = {
    name for name in TRANSCRIPTS if name.startswith(("qwen3_coder", "glm45", "hermes, arguments as text"))
}


def test_reasoning_is_plain_text_without_reasoning_split() -> None:
    for transcript in TRANSCRIPTS.values():
        events = merge_events(read_events(transcript, [transcript.text], split=False))
        assert not [event for event in events if event[0] == "reasoning"]
        for _, text in (event for event in transcript.events if event[0] == "reasoning"):
            assert any(text in event[1] for event in events if event[0] == "text")


def test_calls_have_consecutive_indices_and_unique_ids() -> None:
    for transcript in TRANSCRIPTS.values():
        events = read_events(transcript, [transcript.text])
        started_calls = [event for event in events if isinstance(event, CallStarted)]
        assert [event.call_index for event in started_calls] == list(range(len(started_calls)))
        assert [event.call_index for event in events if isinstance(event, CallArguments)] == list(
            range(len(started_calls))
        )
        assert len({event.call_id for event in started_calls}) == len(started_calls)
        assert all(event.name in TOOLS for event in started_calls)
    events = read_events(TRANSCRIPTS["mistral"], [TRANSCRIPTS["mistral"].text])
    assert {len(event.call_id) for event in events if isinstance(event, CallStarted)} == {9}


def test_reader_handles_a_long_call_one_character_at_a_time() -> None:
    """Pushes a hundred thousand characters one by one: a reader that starts again at each one would take hours."""
    arguments = json.dumps({"city": "x" * 50_000 + '\\"{}' * 5_000})
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    assert merge_events(read_events(TRANSCRIPTS["hermes"], list(text))) == [("call", "weather", arguments)]
