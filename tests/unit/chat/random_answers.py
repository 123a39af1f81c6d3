"""Random answers, as events; and an answer of given events as the steps of a call."""

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
    """The events of an answer: texts and thoughts in any pieces, and calls with their arguments after them."""
    made: list[Event] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["said", "thought", "call"]), max_size=6)):
        if kind == "call":
            made.append(CallStarted(calls, f"call_{calls}", f"tool_{draw(st.integers(0, 2))}"))
            made += [CallArguments(calls, text) for text in draw(st.lists(TEXTS, max_size=3))]
            calls += 1
        else:
            made += [
                (TextPiece if kind == "said" else ReasoningPiece)(text) for text in draw(st.lists(TEXTS, max_size=3))
            ]
    return made


def steps(
    events: Sequence[Event], each: int = 1, finish: FinishReason = "stop", stop: str | None = None
) -> list[Delta]:
    """The events as deltas, `each` to a step; the last one ends the answer."""
    made = [Delta(0, token_ids=(7,), events=tuple(events[at : at + each])) for at in range(0, len(events), each)]
    return [*made, Delta(0, finish_reason=finish, stop_reason=stop)]


def about(call_id: str, tokens: int = 9) -> GenerateCall:
    """A call of one sequence that has made so many tokens."""
    choice = OutputSequence(0, 0, Request("r", PROMPT, RequestParams(max_tokens=99), 0), None)
    choice.completion_tokens, choice.cached_tokens = tokens, CACHED
    fields = ChatRequest.read({"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5})[0]
    shape: Any = lambda call: None  # noqa: E731 - the tests make the shape
    return GenerateCall(CoreRequest(fields, [], "", shape), call_id, "demo", [choice], None, created=1_700_000_000)
