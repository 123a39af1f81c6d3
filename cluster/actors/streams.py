"""The open streams of a replica: what each was sent, and how it goes on when the gang that fed it is gone.

By law 1 a request's tokens depend on its prompt, its settings and its seed alone. So a stream that lost its gang is
submitted again with the tokens it was sent as part of its prompt, and its client sees a pause.
"""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.actors.messages import Loss
from cluster.request import Request, RequestOutput, SpeculationCounts

RESUMES = 3  # a stream that was resumed so often without a token in between may be what ends the gang


@dataclass(frozen=True, slots=True)
class Refusal:
    """In a stream's queue: the engine would not take the request."""

    message: str


@dataclass(slots=True, eq=False)
class Stream:
    """One request that is open here. `request` is as it arrived, with a seed; `dealt` are the tokens sent since.

    `started` says that it was given a token or is over, so that it no longer counts as queued; `cached_tokens` is what
    its prompt found cached then. `submitted`, `begun` and `fruitful` are about the gang's present life: whether the
    request was given to it, whether a step took it in, and whether it gave tokens in return. `involved` says of the
    life before that its last steps worked on the request and gave it no token.
    """

    request: Request
    queue: asyncio.Queue[RequestOutput | Refusal] = field(default_factory=asyncio.Queue)
    rank: int = -1
    dealt: list[int] = field(default_factory=list)
    started: bool = False
    ended: bool = False
    submitted: bool = False
    begun: bool = False
    fruitful: bool = False
    involved: bool = False
    submissions: int = 0
    fruitless_resumes: int = 0  # in a row: lives that it was resumed in and that were lost over it
    unserved: int = 0  # in a row: lives that it was given to and got no token of
    cached_tokens: int = 0
    trees: list[int] = field(default_factory=list)  # tokens that each tree of this life committed
    earlier: SpeculationCounts | None = None  # of the lives before

    @property
    def name(self) -> str:
        """The request's id."""
        return self.request.request_id

    def submission(self) -> Request:
        """The request as the gang is to get it now; calling this submits it."""
        self.submissions += 1
        self.submitted = True
        return replace(
            self.request,
            prompt_token_ids=self.request.prompt_token_ids + tuple(self.dealt),
            resumed_tokens=self.request.resumed_tokens + len(self.dealt),
        )

    def take(self, output: RequestOutput) -> RequestOutput:
        """Note an output of the present life; what the client is to get of it."""
        if self.fruitful and output.token_ids:  # the first output of a life ends its prompt; each later one is a tree
            self.trees.append(len(output.token_ids))
        if output.token_ids:
            self.dealt += output.token_ids
            self.fruitful, self.fruitless_resumes, self.unserved = True, 0, 0
        self.ended = output.finish_reason is not None
        speculation = _added(self.earlier, output.speculation) if self.ended else output.speculation
        # tokens of its own that a resumed request finds in a rank's cache are not the client's prompt
        return replace(output, cached_tokens=self.cached_tokens, speculation=speculation)

    def lose(self, nodes: int) -> None:
        """The gang is gone; `nodes` are the drafted tokens of one tree, 0 without speculation."""
        unserved = self.submitted and not self.fruitful
        self.unserved += unserved
        # Its beginning is announced, but a process may die with the words in its mouth: not four times in a row.
        self.involved = unserved and (self.begun or self.unserved > RESUMES)
        self.fruitless_resumes += self.involved and self.submissions > 1
        if nodes and self.trees:
            accepted = [0] * max(self.trees)
            for tokens in self.trees:
                accepted[tokens - 1] += 1
            lived = SpeculationCounts(len(self.trees), nodes * len(self.trees), tuple(accepted))
            self.earlier = _added(self.earlier, lived)
        self.trees = []
        self.submitted = self.begun = self.fruitful = False

    def end(self, reason: str, finish_reason: Literal["abort", "error"] = "error") -> None:
        """End it with an output that says why: "error" where it is at fault itself, "abort" where the server is."""
        if not self.ended:
            self.ended = True
            self.queue.put_nowait(RequestOutput(self.name, (), finish_reason=finish_reason, error=reason))


def _added(first: SpeculationCounts | None, second: SpeculationCounts | None) -> SpeculationCounts | None:
    """Two counts as one; a tree may be deeper in one than in the other."""
    if first is None or second is None:
        return first or second
    size = max(len(first.accepted), len(second.accepted))
    padded = [(*counts.accepted, *[0] * (size - len(counts.accepted))) for counts in (first, second)]
    accepted = tuple(a + b for a, b in zip(*padded, strict=True))
    return SpeculationCounts(first.steps + second.steps, first.drafted + second.drafted, accepted)


class Recovery:
    """Which streams a new life is given, and when.

    All at once, at first: those that were given tokens before the others, then by age. What was lost once may not be
    lost again. Suspects are the streams that the fatal step worked on without a token, not those that waited. Where the
    gang is lost again with suspects in the fatal step, the cause is most likely one that was in both, and they are
    halved: in the next life those that had tokens go first, then one half of the suspects, then half of the rest, and
    in the end everybody else, each turn when the one before has its tokens. A life that is lost over one half clears
    the other, which then goes before it. Who was alone in the fatal step, and resumed often enough, is ended. Requests
    that arrive meanwhile stay behind those that wait for their turn.
    """

    def __init__(self) -> None:
        self._suspects: list[Stream] = []
        self._cleared: list[Stream] = []  # suspects that a loss over others spoke free
        self._held: list[Stream] = []  # suspects that have had no turn yet
        self._last: list[Stream] | None = None  # who comes after them; None when nobody waits for a turn
        self._pending: set[str] = set()
        self._repeated = False

    def lost(self, streams: list[Stream], loss: Loss) -> None:
        """A life is over, and the open `streams` know what it gave them. The cause is ended once it is known."""
        involved = [stream for stream in streams if stream.involved]
        again = [stream for stream in self._suspects if stream in involved]
        self._cleared = [stream for stream in self._held if again and stream not in again]
        self._repeated = bool(again) or bool(involved and self._last is not None)
        self._suspects = again or involved
        self._held, self._last, self._pending = [], None, set()
        if len(involved) == 1 and involved[0].fruitless_resumes >= RESUMES:
            self._suspects, self._repeated = [], False
            involved[0].end(
                f"request {involved[0].name} was resumed {RESUMES} times without a new token, and the gang was lost "
                f"each time; it may be the cause ({loss})"
            )

    def begin(self, streams: list[Stream]) -> list[Stream]:
        """A new life begins, and `streams` are open, by age; those to submit now, in this order."""
        served = sorted(streams, key=lambda stream: not stream.started)
        if not self._repeated:
            return served
        self._held = [stream for stream in served if stream in self._suspects]
        others = [stream for stream in served if stream not in self._suspects]
        proven = [stream for stream in others if stream.started]
        cleared = [stream for stream in others if stream in self._cleared and not stream.started]
        self._last = [stream for stream in others if stream not in proven and stream not in cleared]
        self._pending = {stream.name for stream in proven + cleared}
        return proven + cleared + self.settled("")

    def arrived(self, stream: Stream) -> bool:
        """Whether a new stream may be submitted now; else `settled` gives it when it is its turn."""
        if self._last is not None:
            self._last.append(stream)
        return self._last is None

    def settled(self, name: str) -> list[Stream]:
        """A stream has its first token of this life, or is over; the streams to submit now."""
        self._pending.discard(name)
        if self._pending or self._last is None:
            return []
        if held := [stream for stream in self._held if not stream.ended]:
            half = (len(held) + 1) // 2
            turn, self._held = held[:half], held[half:]
            self._pending = {stream.name for stream in turn}
            return turn
        turn, self._held, self._last = [stream for stream in self._last if not stream.ended], [], None
        return turn
