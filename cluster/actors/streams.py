"""The open streams of a replica: what was sent on each, and how it continues when the gang that fed it is lost.

By law 1 (docs/architecture.md) a request's tokens depend on its prompt, its settings and its seed alone. So a stream
that lost its gang is submitted again with the tokens already sent as part of its prompt; its client sees a pause.
"""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.actors.messages import Loss
from cluster.request import Request, SequenceOutput, SpeculationCounts

RESUMES = 3  # a stream that was resumed so often and never went on may be what kills the gang


@dataclass(frozen=True, slots=True)
class StreamRefusal:
    """In a stream's queue: the engine refused the request."""

    message: str


@dataclass(slots=True, eq=False)
class OpenStream:
    """One open request. `request` is as it arrived, with a seed; `dealt` are the tokens sent to the client since.

    `started`: it has had an output, so that it no longer counts as queued; `cached_tokens` of its prompt were found
    cached then. `submitted`, `begun`, `answered` and `fruitful` are about the gang's present life: whether the request
    was submitted to it, whether a step has admitted the request, whether its prompt got a token, and whether it went on
    from there. A request whose every step after the prompt ends a life has a token of each life, so that one is no sign
    of innocence. `involved` is about the life before: whether its last steps worked on the request, which did not go
    on.
    """

    request: Request
    queue: asyncio.Queue[SequenceOutput | StreamRefusal] = field(default_factory=asyncio.Queue)
    rank: int = -1
    dealt: list[int] = field(default_factory=list)
    started: bool = False
    ended: bool = False
    submitted: bool = False
    begun: bool = False
    answered: bool = False
    fruitful: bool = False
    involved: bool = False
    submissions: int = 0
    fruitless_resumes: int = 0  # lives in a row that resumed it and were lost while it was `involved`
    unserved: int = 0  # lives in a row that it was submitted to and did not go on in
    cached_tokens: int = 0
    trees: list[int] = field(default_factory=list)  # tokens that each tree of this life committed
    earlier: SpeculationCounts | None = None  # the counts of the lives before

    @property
    def name(self) -> str:
        """The request's id."""
        return self.request.request_id

    def place(self, rank: int) -> None:
        """It is for the leader `rank` to serve."""
        self.rank = rank

    def begin(self) -> None:
        """A step of the present life has admitted the request."""
        self.begun = True

    def leave(self) -> None:
        """Its reader is gone."""
        self.ended = True

    def refuse(self, message: str) -> None:
        """The engine refused the request; its reader is told."""
        self.ended = True
        self.queue.put_nowait(StreamRefusal(message))

    def submission(self) -> Request:
        """The request to submit to the present life, tokens sent so far included; marks the stream as submitted.

        What was asked about the prompt came with the first of these tokens, and is not asked again.
        """
        self.submissions += 1
        self.submitted = True
        if not self.dealt:
            return self.request
        return replace(
            self.request,
            params=replace(self.request.params, prompt_logprobs=None),
            prompt_token_ids=self.request.prompt_token_ids + tuple(self.dealt),
            resumed_tokens=self.request.resumed_tokens + len(self.dealt),
        )

    def take(self, output: SequenceOutput) -> SequenceOutput:
        """Note an output of the present life; returns the output for the client."""
        if not self.started:
            self.started, self.cached_tokens = True, output.cached_tokens
        if output.token_ids:
            if self.answered:  # the first output of a life ends its prompt; each later one is a tree
                self.trees.append(len(output.token_ids))
                self.fruitful, self.fruitless_resumes, self.unserved = True, 0, 0
            self.answered = True
            self.dealt += output.token_ids
        self.ended = output.finish_reason is not None
        speculation = _added(self.earlier, output.speculation) if self.ended else output.speculation
        # of the client's prompt only: a resumed request also finds its generated tokens cached
        return replace(output, cached_tokens=self.cached_tokens, speculation=speculation)

    def lose(self, nodes: int) -> None:
        """The present life is over; `nodes` are the drafted tokens of one tree, 0 without speculation."""
        unserved = self.submitted and not self.fruitful
        self.unserved += unserved
        # A step reports `begun` first, but a process may die before it is sent; more than RESUMES times is no accident.
        self.involved = unserved and (self.begun or self.unserved > RESUMES)
        self.fruitless_resumes += self.involved and self.submissions > 1
        if nodes and self.trees:
            accepted = [0] * max(self.trees)
            for tokens in self.trees:
                accepted[tokens - 1] += 1
            lived = SpeculationCounts(len(self.trees), nodes * len(self.trees), tuple(accepted))
            self.earlier = _added(self.earlier, lived)
        self.trees = []
        self.submitted = self.begun = self.answered = self.fruitful = False

    def end(self, reason: str, finish_reason: Literal["abort", "error"] = "error") -> None:
        """End it with an output that says why: "error" if the request is at fault, "abort" if the server is."""
        if not self.ended:
            self.ended = True
            self.queue.put_nowait(SequenceOutput(self.name, (), finish_reason=finish_reason, error=reason))


def _added(first: SpeculationCounts | None, second: SpeculationCounts | None) -> SpeculationCounts | None:
    """Two counts as one; a tree may be deeper in one than in the other."""
    if first is None or second is None:
        return first or second
    size = max(len(first.accepted), len(second.accepted))
    padded = [(*counts.accepted, *[0] * (size - len(counts.accepted))) for counts in (first, second)]
    accepted = tuple(a + b for a, b in zip(*padded, strict=True))
    return SpeculationCounts(first.steps + second.steps, first.drafted + second.drafted, accepted)


class Recovery:
    """Which streams a new life is given, and when: bisects the streams if one of them seems to kill the gang.

    After a first loss all are submitted at once, those that had tokens first, then by age; the loss may not recur.
    Suspects are the streams that the fatal step worked on and that had not gone on, not those that waited. If the gang
    is lost again with suspects in the fatal step, the cause is most likely among those that were in both, and they are
    bisected: in the next life streams that had tokens go first, then one half of the suspects, then half of the rest
    and so on, and last all others; each turn begins when all streams of the turn before went on or are over. If the
    life is lost during such a turn, the suspects still held back are cleared, and go before the others in the next
    life. A stream that was alone in the fatal step, and was resumed `RESUMES` times and never went on, is ended.
    Requests that arrive during the turns go last.
    """

    def __init__(self) -> None:
        self._suspects: list[OpenStream] = []
        self._cleared: list[OpenStream] = []  # suspects that were held back during a loss
        self._held: list[OpenStream] = []  # suspects that have had no turn yet
        self._last: list[OpenStream] | None = None  # submitted after them; None when there are no turns
        self._pending: set[str] = set()
        self._repeated = False

    def lost(self, streams: list[OpenStream], loss: Loss) -> None:
        """A life is over; `lose` was called on each of the open `streams`. Ends the stream found to be the cause."""
        involved = [stream for stream in streams if stream.involved]
        again = [stream for stream in self._suspects if stream in involved]
        self._cleared = [stream for stream in self._held if again and stream not in again]
        self._repeated = bool(again) or bool(involved and self._last is not None)
        self._suspects = again or involved
        self._held, self._last, self._pending = [], None, set()
        if len(involved) == 1 and involved[0].fruitless_resumes >= RESUMES:
            self._suspects, self._repeated = [], False
            involved[0].end(
                f"request {involved[0].name} was resumed {RESUMES} times and never went on, as the gang was lost "
                f"each time; it may be the cause ({loss})"
            )

    def begin(self, streams: list[OpenStream]) -> list[OpenStream]:
        """A new life begins; returns those of the open `streams` (in order of age) to submit now, in this order."""
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

    def arrived(self, stream: OpenStream) -> bool:
        """Whether a new stream may be submitted now; otherwise `settled` returns it when it is its turn."""
        if self._last is not None:
            self._last.append(stream)
        return self._last is None

    def settled(self, name: str) -> list[OpenStream]:
        """A stream goes on in this life, or is over; returns the streams to submit now."""
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
