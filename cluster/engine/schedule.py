"""The work of one step as the host plans it: which requests decode, which prompt chunks run, and how long that should
take.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.batch import DecodeRequest, PageCopy, PromptChunk, SamplingMode, StepInput
from cluster.config.tree_shape import TreeShape
from cluster.dp_attention.facts import NO_TREES, TreeVote
from cluster.engine.request_state import RequestState
from cluster.kv.cache import Lease
from cluster.kv.page_table import PageTable
from cluster.request import RequestParams


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt rows `start` to `stop - 1` of a request whose pages are those of `lease`; `final` if they end its prompt.
    Each of the first `scored` rows returns the log-probability of the token after it.
    """

    sequence: RequestState
    lease: Lease
    start: int
    stop: int
    final: bool
    scored: int = 0

    def to_prompt_chunk(self) -> PromptChunk:
        """The chunk as plain values."""
        tokens = self.sequence.tokens[self.start : self.stop + 1]  # one more, for the EAGLE shift
        return PromptChunk(self.lease.row, self.start, self.stop, self.final, tuple(tokens), self.scored)


@dataclass(slots=True)
class Schedule:
    """The work of one step.

    `decodes` are requests with their leases (a lease is a request's hold on its pages). The results of a request are
    committed only if it still has the same lease when the results are read. `retracted_count` counts the requests
    retracted for this step. `first_admitted` are the requests of `admitted` that are admitted for the first time.
    `vote` is this rank's vote for the tree of the step.

    The times are predictions by the pace: the `StepTimes` that were fitted to steps measured at start. There is no pace
    if `mixed_prefill_size` is set. Then all times but `decode_us` are 0.

    - `decode_us`: the time of this rank's decoding alone, in microseconds. Without a pace it is the number of decoding
      requests instead.
    - `mixed_decode_us` (`PrefillBudget.busy`) and `prompt_us` (the time of this rank's prompt rows): set if a request
      of this rank decodes, or if one of another group decoded in the last plan.
    - `prefill_us` (the time of a step with only this rank's prompt rows): set in all other steps with prompt rows.
    """

    decodes: list[tuple[RequestState, Lease]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    retracted_count: int = 0
    admitted: list[RequestState] = field(default_factory=list)
    first_admitted: list[RequestState] = field(default_factory=list)
    copies: tuple[PageCopy, ...] = ()
    vote: TreeVote = NO_TREES
    decode_us: int = 0
    mixed_decode_us: float = 0.0
    prompt_us: float = 0.0
    prefill_us: float = 0.0

    @property
    def prompt_rows(self) -> int:
        """The number of prompt rows of the step."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    def to_step_input(self, table: PageTable, with_histories: bool = False) -> StepInput:
        """Return the work as plain values, with the unsent changes of `table`, and with the tokens of admitted requests
        if `with_histories`. Sorts `chunks` in place by length, so that chunks of equal length are neighbours; the
        results of the step have the same order.
        """
        self.chunks.sort(key=lambda chunk: chunk.stop - chunk.start)
        decodes = [sequence for sequence, _ in self.decodes]
        sampled = decodes + [chunk.sequence for chunk in self.chunks if chunk.final]  # these get a token in the step
        mode = mode_of(sequence.request.params for sequence in sampled)
        return StepInput(
            decodes=tuple(
                DecodeRequest(lease.row, min(request.max_committed, request.max_running_tokens), request.committed)
                for request, lease in self.decodes
            ),
            chunks=tuple(chunk.to_prompt_chunk() for chunk in self.chunks),
            samplings=tuple(request.sampling() for request in self.admitted),
            penalties=tuple(
                request.penalties() for request in self.admitted if request.request.params.adjustments is not None
            ),
            constraints=tuple(
                request.constraint() for request in self.admitted if request.request.params.grammar is not None
            ),
            histories=tuple(request.history() for request in self.admitted) if with_histories else (),
            writes=table.unsent_writes,
            window_writes=table.unsent_window_writes,
            copies=self.copies,
            mode=mode | SamplingMode.PROMPT_LOGPROBS if any(chunk.scored for chunk in self.chunks) else mode,
        )

    def begin(self, shape: TreeShape) -> None:
        """Record in all requests of the step that it is in flight, with trees of this shape."""
        for sequence, _ in self.decodes:
            sequence.begin_tree(shape)
        for chunk in self.chunks:
            chunk.sequence.begin_prompt(chunk.stop, chunk.final)


def mode_of(params_of_requests: Iterable[RequestParams]) -> SamplingMode:
    """The sampling mode of a step in which requests with these parameters draw tokens."""
    mode = 0  # a plain int, because `|=` on an `IntFlag` is slow
    for params in params_of_requests:
        if not params.greedy:
            mode |= SamplingMode.RANDOM.value
            if params.top_k or params.top_p < 1 or params.min_p > 0:
                mode |= SamplingMode.FILTERED.value
        if params.logprobs is not None:
            mode |= SamplingMode.LOGPROBS.value
        if params.adjustments is not None:
            mode |= SamplingMode.ADJUSTED.value
            if params.adjustments.bad_words_token_ids:
                mode |= SamplingMode.BAD_WORDS.value
        if params.grammar is not None:
            mode |= SamplingMode.CONSTRAINED.value
        if params.return_tree:
            mode |= SamplingMode.TREES.value
        if params.max_draft_tokens is not None:
            mode |= SamplingMode.LIMITED.value
    return SamplingMode(mode)
