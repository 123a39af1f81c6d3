"""The open streams of a replica: the tokens sent on each stream, and how streams continue after the loss of the gang.

By law 1 (docs/architecture.md) a request's tokens depend only on its prompt, its settings and its seed. So after a loss
a request is submitted again, with the tokens already sent as part of its prompt; the client only sees a pause.
"""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.actors.messages import Loss
from cluster.request import Request, SequenceOutput, SpeculationCounts

RESUMES = 3  # a stream that was resumed this many times and never went on is taken for the cause of the losses


@dataclass(frozen=True, slots=True)
class StreamRefusal:
    """An entry of a stream's queue: the engine refused the request."""

    message: str


@dataclass(slots=True, eq=False)
class OpenStream:
    """One open request. `request` is the request as it arrived, with a seed; `dealt` are the tokens sent to the client.

    `rank` is the leader that serves the request. `started`: the stream has had an output, so the request no longer
    counts as queued; `cached_tokens` tokens of its prompt were cached. `ended`: the stream will have no more outputs.

    Four fields are about the present incarnation. `submitted`: the request was submitted. `begun`: a step admitted the
    request. `answered`: the prompt got a first token. `fruitful`: more tokens came after the first; the stream "went
    on". A first token alone proves nothing: a request that kills every step after its prompt gets one in each
    incarnation. `involved` is about the previous incarnation: its last steps worked on the request, which had not gone
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
    fruitless_resumes: int = 0  # incarnations in a row that resumed the stream and were lost while it was `involved`
    unserved: int = 0  # incarnations in a row to which the request was submitted without going on
    cached_tokens: int = 0
    trees: list[int] = field(default_factory=list)  # tokens that each tree of this incarnation committed
    earlier: SpeculationCounts | None = None  # summed over earlier incarnations

    @property
    def name(self) -> str:
        """The request's id."""
        return self.request.request_id

    def place(self, rank: int) -> None:
        """Assign the request to the leader `rank`."""
        self.rank = rank

    def begin(self) -> None:
        """Note that a step of the present incarnation admits the request."""
        self.begun = True

    def leave(self) -> None:
        """Note that the stream's reader is gone."""
        self.ended = True

    def refuse(self, message: str) -> None:
        """End the stream: the engine refused the request. The reader gets `message`."""
        self.ended = True
        self.queue.put_nowait(StreamRefusal(message))

    def submission(self) -> Request:
        """Return the request to submit to the present incarnation, and mark the stream as submitted. Tokens already
        sent become part of the prompt; prompt logprobs were sent with the first token and are not requested again.
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
        """Record an output of the present incarnation, and return the output to send to the client. The returned output
        has the cached tokens of the stream's first output; the last output has the counts of all incarnations.
        """
        if not self.started:
            self.started, self.cached_tokens = True, output.cached_tokens
        if output.token_ids:
            if self.answered:  # the first output in an incarnation ends the prompt; each later one is a verified tree
                self.trees.append(len(output.token_ids))
                self.fruitful, self.fruitless_resumes, self.unserved = True, 0, 0
            self.answered = True
            self.dealt += output.token_ids
        self.ended = output.finish_reason is not None
        speculation = _added(self.earlier, output.speculation) if self.ended else output.speculation
        # Report cached tokens of the client's prompt only: a resumed request also finds generated tokens cached.
        return replace(output, cached_tokens=self.cached_tokens, speculation=speculation)

    def lose(self, nodes: int) -> None:
        """Note that the present incarnation is over. `nodes` is the number of drafted tokens per tree, 0 without
        speculation.
        """
        unserved = self.submitted and not self.fruitful
        self.unserved += unserved
        # A process may die before it reports `begun`. After more than RESUMES losses assume that the request had begun.
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
        """End the stream with an output that holds `reason`. The `finish_reason` is "error" if the request is at fault,
        and "abort" if the server is.
        """
        if not self.ended:
            self.ended = True
            self.queue.put_nowait(SequenceOutput(self.name, (), finish_reason=finish_reason, error=reason))


def _added(first: SpeculationCounts | None, second: SpeculationCounts | None) -> SpeculationCounts | None:
    """Return the sum of two counts, whose `accepted` may differ in length."""
    if first is None or second is None:
        return first or second
    size = max(len(first.accepted), len(second.accepted))
    padded = [(*counts.accepted, *[0] * (size - len(counts.accepted))) for counts in (first, second)]
    accepted = tuple(a + b for a, b in zip(*padded, strict=True))
    return SpeculationCounts(first.steps + second.steps, first.drafted + second.drafted, accepted)


class Recovery:
    """Decides which streams are submitted to a new incarnation, and when. If a stream seems to kill the gang, the
    streams are bisected.

    Suspects are the streams that the fatal step worked on and that had not gone on; streams that waited are no
    suspects. After a first loss all streams are submitted at once, because the loss may not recur: first the streams
    that had tokens, then the others by age. If the gang is lost again with suspects in the fatal step, the streams that
    were in both fatal steps are the suspects, and are bisected.

    In a bisection, streams are submitted in batches: the streams that had tokens, one half of the suspects, half of the
    remaining suspects and so on, and last all other streams. A batch is submitted when every stream of the batch before
    went on or is over. If the incarnation is lost meanwhile, the suspects not yet submitted are cleared: in the next
    incarnation they are submitted before the suspects. A stream that was alone in the fatal step, was resumed `RESUMES`
    times and never went on is ended. Requests that arrive during a bisection are submitted last.
    """

    def __init__(self) -> None:
        self._suspects: list[OpenStream] = []
        self._cleared: list[OpenStream] = []  # suspects that were held back during a loss
        self._held: list[OpenStream] = []  # suspects that are not submitted yet
        self._last: list[OpenStream] | None = None  # streams to submit after the suspects; None without a bisection
        self._pending: set[str] = set()  # names of submitted streams that must go on or end before the next batch
        self._repeated = False  # whether to bisect in the next incarnation

    def lost(self, streams: list[OpenStream], loss: Loss) -> None:
        """Note that an incarnation is over, and end the stream found to be the cause. The caller has called `lose` on
        each open stream before.
        """
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
        """Begin a new incarnation. Return those of the open `streams` (sorted by age) to submit now, in order."""
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
        """Return whether a new stream may be submitted now. If not, a later call of `settled` returns the stream."""
        if self._last is not None:
            self._last.append(stream)
        return self._last is None

    def settled(self, name: str) -> list[OpenStream]:
        """Note that a stream went on in this incarnation or is over; return the streams to submit now."""
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
