"""Every family's transcripts, in pieces of every kind and cut off anywhere: the same events, and nothing is lost."""

import json
import random

import pytest

from cluster.chat.events import CallArguments, CallStarted, Event, ReasoningPiece, TextPiece
from tests.unit.chat.transcripts import TOOLS, TRANSCRIPTS, Transcript, merged, reader_of


def read(transcript: Transcript, pieces: list[str], **how: bool) -> list[Event]:
    reader = reader_of(transcript, **how)
    return [event for piece in pieces for event in reader.push(piece)] + reader.finish()


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_reader_gives_the_same_events_for_any_split_of_the_text(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    text = transcript.text
    for at in range(len(text) + 1):
        assert merged(read(transcript, [text[:at], text[at:]])) == list(transcript.events), at
    assert merged(read(transcript, list(text))) == list(transcript.events)
    generator = random.Random(7)
    for _ in range(20):
        cuts = sorted(generator.choices(range(len(text) + 1), k=5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert merged(read(transcript, pieces)) == list(transcript.events), cuts


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_truncated_answer_gives_complete_calls_and_remaining_text(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    calls = [event for event in transcript.events if event[0] == "call"]
    for at in range(len(transcript.text)):
        cut = transcript.text[:at]
        told = read(transcript, list(cut))
        found = [event for event in merged(told) if event[0] == "call"]
        assert found == calls[: len(found)], cut
        assert all(isinstance(json.loads(arguments), dict) for _, _, arguments in found)
        after = 0
        for event in told:
            if isinstance(event, TextPiece | ReasoningPiece):
                after = cut.index(event.text, after) + len(event.text)
        plain = {event[0] for event in (*transcript.events, *merged(told))} == {"said"}
        if plain and not transcript.text.startswith("<|channel|>"):
            assert "".join(event[1] for event in merged(told)) == cut, "nothing is lost"


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_reader_never_retracts_emitted_events(name: str) -> None:
    """What has been told after a beginning is the beginning of what is told in the end."""
    transcript = TRANSCRIPTS[name]
    whole = merged(read(transcript, [transcript.text]))
    reader = reader_of(transcript)
    told: list[Event] = []
    for character in transcript.text:
        told += reader.push(character)
        so_far = merged(told)
        if so_far:
            assert so_far[:-1] == whole[: len(so_far) - 1]
            last, same = so_far[-1], whole[len(so_far) - 1]
            assert last[0] == same[0] and same[-1].startswith(last[-1])


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_reader_with_calls_disabled_emits_no_call(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    told = merged(read(transcript, [transcript.text], calls=False))
    assert not [event for event in told if event[0] == "call"]
    for _, _, arguments in (event for event in transcript.events if event[0] == "call"):
        assert any(arguments in event[1] for event in told) or arguments == "{}" or name in REWRITTEN


REWRITTEN = {name for name in TRANSCRIPTS if name.startswith(("qwen3_coder", "glm45", "hermes, arguments as text"))}


def test_reasoning_is_plain_text_without_reasoning_split() -> None:
    for transcript in TRANSCRIPTS.values():
        told = merged(read(transcript, [transcript.text], split=False))
        assert not [event for event in told if event[0] == "thought"]
        for _, text in (event for event in transcript.events if event[0] == "thought"):
            assert any(text in event[1] for event in told if event[0] == "said")


def test_calls_have_consecutive_indices_and_unique_ids() -> None:
    for transcript in TRANSCRIPTS.values():
        told = read(transcript, [transcript.text])
        begun = [event for event in told if isinstance(event, CallStarted)]
        assert [event.call_index for event in begun] == list(range(len(begun)))
        assert [event.call_index for event in told if isinstance(event, CallArguments)] == list(range(len(begun)))
        assert len({event.call_id for event in begun}) == len(begun)
        assert all(event.name in TOOLS for event in begun)
    told = read(TRANSCRIPTS["mistral"], [TRANSCRIPTS["mistral"].text])
    assert {len(event.call_id) for event in told if isinstance(event, CallStarted)} == {9}


def test_reader_handles_a_long_call_one_character_at_a_time() -> None:
    """A hundred thousand characters, one by one: a reader that began anew at each would take hours."""
    arguments = json.dumps({"city": "x" * 50_000 + '\\"{}' * 5_000})
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    assert merged(read(TRANSCRIPTS["hermes"], list(text))) == [("call", "weather", arguments)]
