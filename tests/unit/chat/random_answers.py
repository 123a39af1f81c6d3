"""Random answers as lists of events; and helpers that turn events into the deltas of a call."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from cluster.api.core.adapter import CoreRequest, GenerateCall
from cluster.api.core.conversation import ChatRequest
from cluster.api.core.sequences import Delta, OutputSequence
from cluster.chat.events import CallArguments, CallStarted, Event, ReasoningPiece, TextPiece
from cluster.request import FinishReason, Request, RequestParams

TEXTS = st.text(max_size=5)
PROMPT = (1, 2, 3, 4, 5)
CACHED = 2


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    """Draw the events of an answer: text and reasoning in pieces of any size, and calls, each before its arguments."""
    events: list[Event] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=6)):
        if kind == "call":
            events.append(CallStarted(calls, f"call_{calls}", f"tool_{draw(st.integers(0, 2))}"))
            events += [CallArguments(calls, text) for text in draw(st.lists(TEXTS, max_size=3))]
            calls += 1
        else:
            events += [
                (TextPiece if kind == "text" else ReasoningPiece)(text) for text in draw(st.lists(TEXTS, max_size=3))
            ]
    return events


def deltas_of(
    events: Sequence[Event], events_per_delta: int = 1, finish: FinishReason = "stop", stop: str | None = None
) -> list[Delta]:
    """Deltas with `events_per_delta` events each, and a last delta that ends the answer."""
    deltas = [
        Delta(0, token_ids=(7,), events=tuple(events[at : at + events_per_delta]))
        for at in range(0, len(events), events_per_delta)
    ]
    return [*deltas, Delta(0, finish_reason=finish, stop_reason=stop)]


def generate_call(call_id: str, tokens: int = 9) -> GenerateCall:
    """A call of one sequence that has generated `tokens` tokens."""
    sequence = OutputSequence(0, 0, Request("r", PROMPT, RequestParams(max_tokens=99), 0), None)
    sequence.completion_tokens, sequence.cached_tokens = tokens, CACHED
    fields = ChatRequest.read({"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5})[0]
    formatter: Any = lambda call: None  # noqa: E731 - the tests build the formatter themselves
    return GenerateCall(
        CoreRequest(fields, [], "", formatter), call_id, "demo", [sequence], None, created=1_700_000_000
    )
