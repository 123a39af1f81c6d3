"""The open streams of a replica: the tokens sent on each stream, and how streams continue after the loss of the gang.

By law 1 (docs/architecture.md) a request's tokens depend only on its prompt, its settings and its seed. So after a loss
a request is submitted again, with the tokens already sent as part of its prompt; the client only sees a pause.
"""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

from cluster.actors.messages import Loss
from cluster.request import Request, SequenceOutput, SpeculationCounts

# A stream that was resumed this many times and never went on (got tokens after its first one) is taken for the cause of
# the losses.
MAX_FRUITLESS_RESUMES = 3


@dataclass(frozen=True, slots=True)
class StreamRefusal:
    """Stands in a stream's queue in place of an output: the engine refused the request. `message` says why."""

    message: str


@dataclass(slots=True, eq=False)
class OpenStream:
    """One open request. `request` is the request as it arrived, with a seed; `sent_tokens` are the tokens sent to the
    client. `latest_request` is the request as it was last submitted: tokens sent before are part of its prompt.

    `started` is True when the stream has had an output; at that output `cached_tokens` tokens of the prompt were
    cached. `ended` is True when the stream will have no more outputs.

    Four fields are about the present incarnation (run of the gang from a start to its loss). `submitted`: the request
    was submitted. `admitted`: a step admitted the request. `has_first_token`: the request got a token. `made_progress`:
    more tokens came after the first; the stream "went on". A first token alone proves nothing: a request that kills
    every step after its prompt gets one in each incarnation. `in_fatal_step` is about the previous incarnation: when it
    was lost, it had admitted the request, and the stream had not gone on.
    """

    request: Request
    latest_request: Request = field(init=False)
    queue: asyncio.Queue[SequenceOutput | StreamRefusal] = field(default_factory=asyncio.Queue)
    sent_tokens: list[int] = field(default_factory=list)
    started: bool = False
    ended: bool = False
    submitted: bool = False
    admitted: bool = False
    has_first_token: bool = False
    made_progress: bool = False
    in_fatal_step: bool = False
    submissions: int = 0
    # Incarnations in a row that resumed the stream and were lost while it was `in_fatal_step`.
    fruitless_resumes: int = 0
    submissions_without_progress: int = 0  # lost incarnations in a row that had the request, and it never went on
    cached_tokens: int = 0
    tokens_per_tree: list[int] = field(default_factory=list)  # tokens that each tree of this incarnation committed
    earlier_counts: SpeculationCounts | None = None  # summed over earlier incarnations

    def __post_init__(self) -> None:
        self.latest_request = self.request

    @property
    def name(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def length(self) -> int:
        """The number of the request's tokens so far, prompt included."""
        return len(self.request.prompt_token_ids) + len(self.sent_tokens)

    def on_admitted(self) -> None:
        """Record that a step of the present incarnation admits the request."""
        self.admitted = True

    def on_reader_gone(self) -> None:
        """Record that the stream's reader is gone."""
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
        self.latest_request = self.request
        if self.sent_tokens:
            self.latest_request = replace(
                self.request,
                params=replace(self.request.params, prompt_logprobs=None),
                prompt_token_ids=self.request.prompt_token_ids + tuple(self.sent_tokens),
                resumed_tokens=self.request.resumed_tokens + len(self.sent_tokens),
            )
        return self.latest_request

    def record(self, output: SequenceOutput) -> SequenceOutput:
        """Record an output of the present incarnation, and return the output to send to the client. The returned output
        has the cached tokens of the stream's first output; the last output has the counts of all incarnations.
        """
        if not self.started:
            self.started, self.cached_tokens = True, output.cached_tokens
        if output.token_ids:
            # The first output in an incarnation comes from the prompt, each later one from a verified tree.
            if self.has_first_token:
                self.tokens_per_tree.append(len(output.token_ids))
                self.made_progress, self.fruitless_resumes, self.submissions_without_progress = True, 0, 0
            self.has_first_token = True
            self.sent_tokens += output.token_ids
        self.ended = output.finish_reason is not None
        speculation = _sum_counts(self.earlier_counts, output.speculation) if self.ended else output.speculation
        # Report cached tokens of the client's prompt only: a resumed request also finds generated tokens cached.
        return replace(output, cached_tokens=self.cached_tokens, speculation=speculation)

    def on_incarnation_lost(self, drafted_per_tree: int) -> None:
        """Record that the present incarnation is over. `drafted_per_tree` is the number of drafted tokens per tree, 0
        without speculation.
        """
        without_progress = self.submitted and not self.made_progress
        self.submissions_without_progress += without_progress
        # A process may die before it reports `admitted`. After more than MAX_FRUITLESS_RESUMES losses without progress,
        # assume that the request was admitted.
        self.in_fatal_step = without_progress and (
            self.admitted or self.submissions_without_progress > MAX_FRUITLESS_RESUMES
        )
        self.fruitless_resumes += self.in_fatal_step and self.submissions > 1
        if drafted_per_tree and self.tokens_per_tree:
            accepted = [0] * max(self.tokens_per_tree)
            for tokens in self.tokens_per_tree:
                accepted[tokens - 1] += 1
            counts = SpeculationCounts(
                len(self.tokens_per_tree), drafted_per_tree * len(self.tokens_per_tree), tuple(accepted)
            )
            self.earlier_counts = _sum_counts(self.earlier_counts, counts)
        self.tokens_per_tree = []
        self.submitted = self.admitted = self.has_first_token = self.made_progress = False

    def end(self, reason: str, finish_reason: Literal["abort", "error"] = "error") -> None:
        """End the stream with an output that holds `reason`, unless the stream has ended already. The `finish_reason`
        is "error" if the request is at fault, and "abort" if the server is.
        """
        if not self.ended:
            self.ended = True
            self.queue.put_nowait(SequenceOutput(self.name, (), finish_reason=finish_reason, error=reason))


def _sum_counts(first: SpeculationCounts | None, second: SpeculationCounts | None) -> SpeculationCounts | None:
    """Return the sum of two counts, whose `accepted` may differ in length. None counts as zero; None if both are."""
    if first is None or second is None:
        return first or second
    size = max(len(first.accepted), len(second.accepted))
    padded = [(*counts.accepted, *[0] * (size - len(counts.accepted))) for counts in (first, second)]
    accepted = tuple(a + b for a, b in zip(*padded, strict=True))
    return SpeculationCounts(first.steps + second.steps, first.drafted + second.drafted, accepted)


StreamT = TypeVar("StreamT", bound=OpenStream)


class Recovery(Generic[StreamT]):
    """Decides which streams are submitted to a new incarnation, and when. If a stream seems to kill the gang, the
    streams are bisected.

    After a loss, the suspects are the streams with `in_fatal_step`: the lost incarnation had admitted them, and they
    had not gone on (got no token after their first one). Streams that waited are no suspects. After a first loss all
    streams are submitted at once, because the loss may not recur: first the streams that had tokens, then the others,
    each by age. If the gang is lost again, the streams that were suspects both times remain suspects, and are bisected.

    In a bisection, streams are submitted in batches: the streams that had tokens, one half of the suspects, half of the
    remaining suspects and so on, and last all other streams. A batch is submitted when every stream of the batch before
    went on or is over. If the incarnation is lost meanwhile, the suspects not yet submitted are cleared: in the next
    incarnation they are submitted before the suspects. A stream is ended if it was the only suspect, was resumed
    `MAX_FRUITLESS_RESUMES` times and never went on. Requests that arrive during a bisection are submitted last.
    """

    def __init__(self) -> None:
        self._suspects: list[StreamT] = []
        self._cleared: list[StreamT] = []  # suspects that were held back during a loss
        self._unsubmitted_suspects: list[StreamT] = []  # suspects that are not submitted yet
        self._deferred: list[StreamT] | None = None  # streams to submit after the suspects; None without a bisection
        self._pending: set[str] = set()  # names of submitted streams; the next batch waits until each goes on or ends
        self._bisecting = False  # whether to bisect in the next incarnation

    def on_loss(self, streams: list[StreamT], loss: Loss) -> None:
        """Record that an incarnation of the gang is over. If one stream is now taken for the cause of the losses, end
        that stream. Before this call, the caller must call `on_incarnation_lost` on each of the open `streams`.
        """
        in_fatal_step = [stream for stream in streams if stream.in_fatal_step]
        repeated_suspects = [stream for stream in self._suspects if stream in in_fatal_step]
        self._cleared = [
            stream for stream in self._unsubmitted_suspects if repeated_suspects and stream not in repeated_suspects
        ]
        self._bisecting = bool(repeated_suspects) or bool(in_fatal_step and self._deferred is not None)
        self._suspects = repeated_suspects or in_fatal_step
        self._unsubmitted_suspects, self._deferred, self._pending = [], None, set()
        if len(in_fatal_step) == 1 and in_fatal_step[0].fruitless_resumes >= MAX_FRUITLESS_RESUMES:
            self._suspects, self._bisecting = [], False
            in_fatal_step[0].end(
                f"request {in_fatal_step[0].name} was resumed {MAX_FRUITLESS_RESUMES} times and never went on, as the "
                f"gang was lost each time; it may be the cause ({loss})"
            )

    def begin(self, streams: list[StreamT]) -> list[StreamT]:
        """Begin a new incarnation. Return those of the open `streams` (sorted by age) to submit now, in order."""
        ordered = sorted(streams, key=lambda stream: not stream.started)
        if not self._bisecting:
            return ordered
        self._unsubmitted_suspects = [stream for stream in ordered if stream in self._suspects]
        others = [stream for stream in ordered if stream not in self._suspects]
        with_tokens = [stream for stream in others if stream.started]
        cleared = [stream for stream in others if stream in self._cleared and not stream.started]
        self._deferred = [stream for stream in others if stream not in with_tokens and stream not in cleared]
        self._pending = {stream.name for stream in with_tokens + cleared}
        return with_tokens + cleared + self.on_settled("")

    def on_arrival(self, stream: StreamT) -> bool:
        """Return whether a new stream may be submitted now. If not, a later call of `on_settled` returns the stream."""
        if self._deferred is not None:
            self._deferred.append(stream)
        return self._deferred is None

    def on_settled(self, name: str) -> list[StreamT]:
        """Record that a stream went on in this incarnation or is over; return the streams to submit now."""
        self._pending.discard(name)
        if self._pending or self._deferred is None:
            return []
        if suspects := [stream for stream in self._unsubmitted_suspects if not stream.ended]:
            half = (len(suspects) + 1) // 2
            batch, self._unsubmitted_suspects = suspects[:half], suspects[half:]
            self._pending = {stream.name for stream in batch}
            return batch
        batch, self._unsubmitted_suspects, self._deferred = (
            [stream for stream in self._deferred if not stream.ended],
            [],
            None,
        )
        return batch
