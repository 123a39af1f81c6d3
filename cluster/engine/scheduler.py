"""Chooses what runs in the next step: every prefilled request decodes, prompt chunks join within the row budget.

Knows pages through the cache, nothing of tensors or models. First come, first served; when pages run out the request
admitted last goes back to the front of the queue, so the oldest always makes progress.

A request whose next pages a running prompt is about to compute waits for them instead of computing them too. It loses
a step at most, because running prompts get the rows of a step before newcomers anyway. It waits for running prompts
only, and checks again before every step, so it goes on even if the other request is retracted, aborted or ends.
Requests behind it may pass meanwhile, but a row of the tables and the pages that it will need are set aside.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from cluster.batch import DecodeRequest, PageCopy, PageWrite, PromptChunk, SamplingMode, StepInput
from cluster.config import EngineConfig
from cluster.config.tree_shape import TreeShape, tree_shape
from cluster.engine.pace_correction import Correction
from cluster.engine.sequence import RequestState
from cluster.kv.cache import KVCache, Lease, Next
from cluster.observability.step_times import PrefillBudget, StepTimes
from cluster.request import RequestParams

SCORED_ROWS = 512
"""The most prompt rows of a step whose logits are asked for: so many times the vocabulary is held at once."""
WORTH_WAITING = 16
"""The fewest prompt rows that waiting must save: it may cost a step, whose fixed cost equals that of some rows."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt rows `start` to `stop - 1` of a request that runs on `lease`; `final` when its prompt is then complete.
    The first `scored` rows are asked for the log-probability of the token after them.
    """

    sequence: RequestState
    lease: Lease
    start: int
    stop: int
    final: bool
    scored: int = 0

    def order(self) -> PromptChunk:
        """This chunk as plain values."""
        tokens = self.sequence.tokens[self.start : self.stop + 1]
        return PromptChunk(self.lease.row, self.start, self.stop, self.final, tuple(tokens), self.scored)


@dataclass(slots=True)
class Schedule:
    """One step's work. `decodes` are requests with the leases on which they run: what the step gives to a request
    counts only if it still runs on that lease. `retracted` counts requests that lost their pages to the step; `fresh`
    were `admitted` the first time.

    `decode_us` is the predicted time of the decoding alone, or the number of decoding requests if there is no pace.
    Beside requests that decode on any rank, this rank is predicted to need `busy_us` for them and `rows_us` for its
    prompt rows. If no request decodes, it is predicted to need `alone_us` for its prompt rows.
    """

    decodes: list[tuple[RequestState, Lease]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    retracted: int = 0
    admitted: list[RequestState] = field(default_factory=list)
    fresh: list[RequestState] = field(default_factory=list)
    copies: tuple[PageCopy, ...] = ()
    decode_us: int = 0
    busy_us: float = 0.0
    rows_us: float = 0.0
    alone_us: float = 0.0

    @property
    def prompt_rows(self) -> int:
        """c, the prompt rows of the step."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    def order(self, writes: tuple[PageWrite, ...]) -> StepInput:
        """This work as plain values. The chunks are put in order of length, so that equal ones form groups."""
        self.chunks.sort(key=lambda chunk: chunk.stop - chunk.start)
        decodes = [sequence for sequence, _ in self.decodes]
        drawing = decodes + [chunk.sequence for chunk in self.chunks if chunk.final]
        return StepInput(
            decodes=tuple(DecodeRequest(lease.row, min(s.reach, s.longest), s.committed) for s, lease in self.decodes),
            chunks=tuple(chunk.order() for chunk in self.chunks),
            samplings=tuple(s.sampling() for s in self.admitted),
            adjustings=tuple(s.adjusting() for s in self.admitted if s.request.params.adjustments is not None),
            constraints=tuple(s.constraint() for s in self.admitted if s.request.params.grammar is not None),
            writes=writes,
            copies=self.copies,
            mode=mode_of(sequence.request.params for sequence in drawing) | self._scoring,
        )

    @property
    def _scoring(self) -> SamplingMode:
        return SamplingMode.PROMPT_LOGPROBS if any(chunk.scored for chunk in self.chunks) else SamplingMode(0)

    def begin(self, shape: TreeShape) -> None:
        """The step is under way, with trees of this shape."""
        for sequence, _ in self.decodes:
            sequence.begin_tree(shape)
        for chunk in self.chunks:
            chunk.sequence.begin_prompt(chunk.stop, chunk.final)


@dataclass(slots=True)
class RemainingRows:
    """What prompt chunks may still take of a step: `rows` and, with a `pace`, predicted microseconds of `allowance`.

    `spent` is the predicted time of the chunks so far, `beside` counts the target rows of the step so far, `prefilling`
    the other groups that run prompt rows. The `first` chunk gets at least `StepTimes.least` rows, even if it overdraws
    the allowance; later steps make up for that. Of the rows, `scored` may be scored.
    """

    rows: int
    allowance: float = 0.0
    pace: StepTimes | None = None
    spent: float = 0.0
    beside: int = 0
    prefilling: int = 0
    first: bool = True
    scored: int = SCORED_ROWS

    @property
    def left(self) -> bool:
        """Whether one more prompt row may join the step."""
        return self.rows > 0 and (self.pace is None or self.allowance > 0.0)

    def fits(self, start: Callable[[], int]) -> bool:
        """Whether `take` gives a row to a prompt from `start()` on; `start` is called only where it matters."""
        if not self.left or self.pace is None or self.first:
            return self.left
        return self.pace.cost(self.beside, start(), 1, self.prefilling) <= self.allowance

    def take(self, start: int, stop: int) -> int:
        """Take as many of the prompt rows `start` to `stop - 1` as fit; returns how many, 0 if not even one does."""
        count = min(stop - start, self.rows)
        if self.pace is not None:
            paid = self.pace.rows(self.beside, start, count, self.allowance, self.prefilling)
            least = self.pace.least(self.beside, start, count, self.prefilling) if self.first else 0
            count = min(count, max(paid, least))
            cost = self.pace.cost(self.beside, start, count, self.prefilling)
            self.allowance, self.spent = self.allowance - cost, self.spent + cost
        self.rows -= count
        self.beside += count
        self.first = False
        return count


class Scheduler:
    """The waiting queue and the running list of one rank."""

    def __init__(self, config: EngineConfig, cache: KVCache, window: int, pace: StepTimes | None = None) -> None:
        """`window` is W, the slots beyond its committed tokens that a decoding request may write in a step. `pace`
        bounds the prompt rows beside decoding requests where `mixed_prefill_size` does not; None leaves them unbounded.
        """
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self._cache, self._window = cache, window
        self._shape = tree_shape(config).forcing()
        self._ahead = cache.pages_for(WORTH_WAITING)
        self._budget = config.chunked_prefill_size if config.chunked_prefill_size > 0 else 1 << 30
        self._mixed_budget = min(self._budget, config.mixed_prefill_size or self._budget)
        self._pace = None if config.mixed_prefill_size else pace
        self._overdrawn = 0.0
        self.correction = Correction()

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens not yet computed, of waiting and of running requests."""
        running = sum(len(s.tokens) - s.reach for s in self.running if s.prefilling)
        return running + sum(len(s.tokens) for s in self.waiting)

    def schedule(self, busiest: int = 0, prefilling: int = 0) -> Schedule:
        """The next step's work; leases are grown to hold it. `busiest` is the `decode_us` of the busiest other
        group, whose requests wait for the prompt rows of this step; `prefilling` other groups run prompt rows as well.
        """
        plan = Schedule()
        self._publish()
        plan.decodes, plan.retracted = self._make_room()
        prefill_budget = self._prefill_budget(plan, busiest)
        room = self._room(plan, prefill_budget, busiest, prefilling)
        for sequence in self.running:
            if sequence.prefilling and room.left:
                self._ride(plan, sequence, room)
        if self.waiting and not plan.retracted:
            self._admit_waiting(plan, room)
        plan.copies = self._cache.take_copies()
        self._overdrawn = min(0.0, room.allowance)
        if prefill_budget is not None:
            plan.busy_us, plan.rows_us = prefill_budget.busy, room.spent
        elif self._pace is not None and plan.chunks:
            costs = (self._pace.cost(0, chunk.start, chunk.stop - chunk.start, prefilling) for chunk in plan.chunks)
            plan.alone_us = self._pace.fixed + sum(costs)
        return plan

    def learn(self, plan: Schedule, decode_us: int, prompt_rows: int, took_us: float) -> None:
        """Record that the step of this plan took `took_us`. `decode_us` was predicted for the busiest group's decoding;
        `prompt_rows` are those of the group that ran the most.
        """
        if self._pace is None:
            return
        if not decode_us:
            telling = plan.alone_us > 2 * self._pace.fixed  # prompt rows took most of it
            if telling and plan.prompt_rows >= prompt_rows:  # otherwise another group made the step long
                self.correction.prefilled(plan.alone_us, took_us)
        elif not prompt_rows:
            self.correction.decoded(decode_us, took_us)
        elif plan.rows_us:
            self.correction.prompted(plan.busy_us, plan.rows_us, took_us)

    def release(self, sequence: RequestState) -> None:
        """Forget a request, waiting or running; its committed pages go to the radix tree."""
        if sequence.lease is None:
            self.waiting.remove(sequence)
            return
        self._stop(sequence, sequence.committed)

    def discard(self, sequence: RequestState) -> None:
        """Forget a running request and all it computed: none of its pages enter the radix tree."""
        self._stop(sequence, 0)

    def _stop(self, sequence: RequestState, sound: int) -> None:
        """Stop running a request, of whose tokens the first `sound` have KV that others may read."""
        assert sequence.lease is not None, "only a running request has a lease"
        self.running.remove(sequence)
        self._cache.close(sequence.lease, sequence.tokens, sound)
        sequence.leave()

    def _prefill_budget(self, plan: Schedule, busiest: int) -> PrefillBudget | None:
        """What decoding takes of the step and leaves to prompts; None where no request decodes or no pace is kept."""
        committed, pace = [s.reach for s, _ in plan.decodes], self._pace
        plan.decode_us = len(committed) if pace is None else int(pace.decoding(committed)) if committed else 0
        return pace.prefill_budget(committed, busiest) if pace is not None and (committed or busiest) else None

    def _room(
        self, plan: Schedule, prefill_budget: PrefillBudget | None, busiest: int, prefilling: int
    ) -> RemainingRows:
        if not plan.decodes and not busiest:
            return RemainingRows(self._budget)
        if prefill_budget is None or self._pace is None:
            return RemainingRows(self._mixed_budget)
        allowance = prefill_budget.allowance / self.correction.dearer.value + self._overdrawn
        return RemainingRows(
            self._mixed_budget, allowance, self._pace, 0.0, len(plan.decodes) * self._pace.tree, prefilling
        )

    def _ride(self, plan: Schedule, sequence: RequestState, room: RemainingRows) -> None:
        start, end = sequence.reach, len(sequence.tokens)
        if sequence.scores_left(start, end):
            if not room.scored:
                return
            end = min(end, start + room.scored)
        stop = start + room.take(start, end)
        if stop > start and sequence.lease is not None:
            scored = sequence.scores_left(start, stop)
            room.scored -= scored
            plan.chunks.append(Chunk(sequence, sequence.lease, start, stop, stop == len(sequence.tokens), scored))

    def _decoding(self) -> list[tuple[RequestState, Lease]]:
        """The requests that decode in the next step, but for those that end with the steps under way."""
        return [(s, s.lease) for s in self.running if s.lease is not None and not (s.prefilling or s.ends)]

    def _make_room(self) -> tuple[list[tuple[RequestState, Lease]], int]:
        """Grow the window of every request that is to decode, retracting from the end of the running list if need be;
        returns those that decode, and how many were retracted.
        """
        retracted = 0
        while True:
            decodes = self._decoding()
            reaches = [min(s.reach, s.longest) + self._window_of(s) for s, _ in decodes]
            if self._cache.grow([lease for _, lease in decodes], reaches):
                return decodes, retracted
            self._retract(self.running[-1])
            retracted += 1

    def _window_of(self, sequence: RequestState) -> int:
        """The slots that a step may write for a request; those with a grammar may have forced nodes."""
        return self._window if sequence.request.params.grammar is None else max(self._window, self._shape.window)

    def _retract(self, sequence: RequestState) -> None:
        self.release(sequence)
        self.waiting.appendleft(sequence)

    def _publish(self) -> None:
        """Let other requests read the pages that the last step completed."""
        for sequence in self.running:
            if sequence.lease is not None:
                self._cache.publish(sequence.lease, sequence.tokens, sequence.committed)

    def _admit_waiting(self, plan: Schedule, room: RemainingRows) -> None:
        """Admit in order of arrival, as long as there are pages, and at least a row of the step for each."""
        coming = {self._next(s) for s in self.running if not s.known} - {None}
        spare = sum(map(self._growth, self.running))
        passed = 0  # requests at the front of the queue that wait for a prefix
        while room.left and passed < min(len(self.waiting), self._cache.free_rows):
            sequence = self.waiting[passed]
            wanted = self._next(sequence) if coming and sequence.cacheable is None else None
            if wanted is not None and wanted in coming:
                whole = self._cache.pages_for(len(sequence.tokens) + self._window_of(sequence))
                spare += max(0, whole - wanted.entry - self._ahead)
                passed += 1
                continue
            fresh = sequence.cached_tokens is None
            begins = partial(self._cache.most_cached, sequence.tokens, sequence.request.cache_salt, sequence.cacheable)
            if not room.fits(begins) or not self._admit(sequence, spare):
                break
            del self.waiting[passed]
            spare += self._growth(sequence)
            coming.add(self._next(sequence))
            if fresh:
                plan.fresh.append(sequence)
            plan.admitted.append(sequence)
            self._ride(plan, sequence, room)

    def _next(self, sequence: RequestState) -> Next | None:
        """The pages that this request is going to compute next, as many as are worth waiting for."""
        return self._cache.next(sequence.tokens, self._ahead, sequence.lease, sequence.request.cache_salt)

    def _growth(self, sequence: RequestState) -> int:
        """The most pages that a running request may take before its next step: the step that now begins commits at most
        S + 1 tokens, and leaves the request running only if it may generate more.
        """
        assert sequence.lease is not None, "only running requests grow"
        if sequence.prefilling:
            most = len(sequence.tokens)
        else:
            most = min(sequence.reach + sequence.most_of(self._shape), sequence.longest)
        return max(0, self._cache.pages_for(most + self._window_of(sequence)) - sequence.lease.pages)

    def _admit(self, sequence: RequestState, spare: int) -> bool:
        """Open a lease that leaves `spare` pages free, and those for its own first window, so that admission does not
        cause retraction.
        """
        known = len(sequence.tokens)
        window = self._cache.pages_for(known + self._window_of(sequence)) - self._cache.pages_for(known)
        salt, most = sequence.request.cache_salt, sequence.cacheable
        lease = self._cache.open(sequence.tokens, known, spare + window, salt, most)
        if lease is None:
            return False
        sequence.join(lease)
        self.running.append(sequence)
        return True


def mode_of(drawing: Iterable[RequestParams]) -> SamplingMode:
    """What a step needs in which requests with these parameters draw tokens."""
    mode = 0
    for params in drawing:
        if not params.greedy:
            mode |= SamplingMode.NOISY.value
            if params.top_k or params.top_p < 1 or params.min_p > 0:
                mode |= SamplingMode.FILTERED.value
        if params.logprobs is not None:
            mode |= SamplingMode.LOGPROBS.value
        if params.adjustments is not None:
            mode |= SamplingMode.ADJUSTED.value
            if params.adjustments.bad_words_token_ids:
                mode |= SamplingMode.WORDS.value
        if params.grammar is not None:
            mode |= SamplingMode.CONSTRAINED.value
        if params.return_tree:
            mode |= SamplingMode.TREES.value
    return SamplingMode(mode)
