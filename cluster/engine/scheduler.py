"""The scheduler of one rank: every prefilled request decodes, and prompt chunks join within the prefill budget.

It knows pages (through the cache), but no tensors and no models. First come, first served. When pages run out, the
request admitted last is retracted: it goes back to the front of the queue, so the oldest always makes progress.

If a running prompt is about to compute the next pages of a waiting request, the waiting request stays in the queue
until it can share these pages. That delays it by at most one step, because running prompts get rows before new requests
anyway. The condition is checked again before every step, so the waiting request goes on even if the other request is
retracted, aborted or ends. Later requests may pass it, but its table row and the pages it will need stay reserved.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from cluster.batch import DecodeRequest, PageCopy, PageWrite, PromptChunk, SamplingMode, StepInput
from cluster.config.resolved import ResolvedSettings
from cluster.config.tree_shape import TreeShape
from cluster.engine.pace_correction import Correction
from cluster.engine.sequence import RequestState
from cluster.kv.cache import KVCache, Lease, Next
from cluster.observability.step_times import PrefillBudget, StepTimes
from cluster.request import RequestParams

SCORED_ROWS = 512
"""Most prompt rows of a step that return log-probabilities: the logits of all of them are in memory at once."""
WORTH_WAITING = 16
"""A request waits for another prompt only to share at least this many tokens, rounded up to pages. Waiting may cost a
step, and the fixed cost of a step equals that of some rows.
"""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt rows `start` to `stop - 1` of a request that runs on `lease`; `final` if they end its prompt. Each of the
    first `scored` rows returns the log-probability of the token after it.
    """

    sequence: RequestState
    lease: Lease
    start: int
    stop: int
    final: bool
    scored: int = 0

    def order(self) -> PromptChunk:
        """The chunk as plain values."""
        tokens = self.sequence.tokens[self.start : self.stop + 1]  # one more, for the EAGLE shift
        return PromptChunk(self.lease.row, self.start, self.stop, self.final, tuple(tokens), self.scored)


@dataclass(slots=True)
class Schedule:
    """The work of one step.

    `decodes` are requests with their leases: the results of a request are committed only if it still has the same lease
    when they are read. `retracted` counts the requests retracted for this step. `fresh` are the requests of `admitted`
    that are admitted for the first time.

    The times are predictions by the pace: the `StepTimes` that were fitted to steps measured at start. There is no pace
    if `mixed_prefill_size` is set. Then all times but `decode_us` are 0.

    - `decode_us`: the time of this rank's decoding alone. Without a pace it is no time but the number of decoding
      requests.
    - `busy_us`, `rows_us`: set if a request decodes (of another group: in the last plan); `PrefillBudget.busy`, and the
      time of this rank's prompt rows.
    - `alone_us`: set otherwise; the time of a step with only this rank's prompt rows.
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
        """Return the work as plain values. Sorts `chunks` in place by length, so that chunks of equal length are
        neighbours; the results of the step have the same order.
        """
        self.chunks.sort(key=lambda chunk: chunk.stop - chunk.start)
        decodes = [sequence for sequence, _ in self.decodes]
        drawing = decodes + [chunk.sequence for chunk in self.chunks if chunk.final]  # these get a token in the step
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
        """Note in all requests that the step is in flight, with trees of this shape."""
        for sequence, _ in self.decodes:
            sequence.begin_tree(shape)
        for chunk in self.chunks:
            chunk.sequence.begin_prompt(chunk.stop, chunk.final)


@dataclass(slots=True)
class RemainingRows:
    """What is left of a step's prefill budget: `rows` prompt rows and, if there is a `pace` (see `Schedule`),
    `allowance` microseconds of predicted time.

    `spent` is the predicted time of the chunks so far. `beside` counts the target rows of the step so far. `prefilling`
    is the number of other groups that run prompt rows. `first` is True until a chunk has been taken. The first chunk
    gets at least `StepTimes.least` rows, even if their cost exceeds the allowance; the next step has that much less.
    `scored` is the number of rows that may still return log-probabilities.
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
        """Whether `take` would give at least one row to a chunk that begins at token `start()`. `start` is a function,
        because it is called only if the answer depends on it.
        """
        if not self.left or self.pace is None or self.first:
            return self.left
        return self.pace.cost(self.beside, start(), 1, self.prefilling) <= self.allowance

    def take(self, start: int, stop: int) -> int:
        """Take as many prompt rows as the budget allows, of `start` to `stop - 1`. Return their number, maybe 0."""
        count = min(stop - start, self.rows)
        if self.pace is not None:
            paid = self.pace.rows(self.beside, start, count, self.allowance, self.prefilling)
            # A chunk reads its whole prefix, so the first chunk gets enough rows to be worth it.
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

    def __init__(self, resolved: ResolvedSettings, cache: KVCache, window: int, pace: StepTimes | None = None) -> None:
        """`window` is W, the slots beyond its committed tokens that a decoding request may write in a step. `pace`
        limits the prompt rows of steps in which requests decode. If it is None, or `mixed_prefill_size` is set, only
        the sizes of the config limit them.
        """
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self._cache, self._window = cache, window
        self._shape = resolved.forced_shape
        self._ahead = cache.pages_for(WORTH_WAITING)  # the pages that two prompts must share for one to wait
        self._budget, self._mixed_budget = resolved.chunk_rows, resolved.mixed_rows
        self._pace = pace if resolved.paced else None
        self._overdrawn = 0.0  # microseconds, 0 or less: what the last step took beyond its allowance
        self.correction = Correction()

    @property
    def queued_tokens(self) -> int:
        """The prompt tokens of waiting and running requests that are not computed yet."""
        running = sum(len(s.tokens) - s.reach for s in self.running if s.prefilling)
        return running + sum(len(s.tokens) for s in self.waiting)

    def schedule(self, busiest: int = 0, prefilling: int = 0) -> Schedule:
        """Return the work of the next step, and grow the leases to hold it. `busiest` is the largest `decode_us` of
        other groups, whose requests wait while this group computes prompt rows. `prefilling` is the number of other
        groups that run prompt rows.
        """
        plan = Schedule()
        self._publish()  # first, so that requests admitted now find the pages of the last step
        plan.decodes, plan.retracted = self._make_room()  # decoding requests get their pages before new prompts do
        prefill_budget = self._prefill_budget(plan, busiest)
        room = self._room(plan, prefill_budget, busiest, prefilling)
        for sequence in self.running:
            if sequence.prefilling and room.left:
                self._ride(plan, sequence, room)
        if self.waiting and not plan.retracted:  # after a retraction pages are short: admit nobody
            self._admit_waiting(plan, room)
        plan.copies = self._cache.take_copies()
        self._overdrawn = min(0.0, room.allowance)  # taken from the allowance of the next step
        if prefill_budget is not None:
            plan.busy_us, plan.rows_us = prefill_budget.busy, room.spent
        elif self._pace is not None and plan.chunks:
            costs = (self._pace.cost(0, chunk.start, chunk.stop - chunk.start, prefilling) for chunk in plan.chunks)
            plan.alone_us = self._pace.fixed + sum(costs)
        return plan

    def learn(self, plan: Schedule, decode_us: int, prompt_rows: int, took_us: float) -> None:
        """Update the correction of the pace by a finished step. `plan` is its schedule and `took_us` its measured time.
        `decode_us` is the largest of all groups, and `prompt_rows` the largest number of prompt rows of any group.
        """
        if self._pace is None:
            return
        if not decode_us:
            telling = plan.alone_us > 2 * self._pace.fixed  # prompt rows, not the fixed cost, took most of the time
            if telling and plan.prompt_rows >= prompt_rows:  # otherwise another group determined the time
                self.correction.prefilled(plan.alone_us, took_us)
        elif not prompt_rows:
            self.correction.decoded(decode_us, took_us)
        elif plan.rows_us:
            self.correction.prompted(plan.busy_us, plan.rows_us, took_us)

    def release(self, sequence: RequestState) -> None:
        """Drop a request, waiting or running; its committed full pages go to the radix tree."""
        if sequence.lease is None:
            self.waiting.remove(sequence)
            return
        self._stop(sequence, sequence.committed)

    def discard(self, sequence: RequestState) -> None:
        """Drop a running request and its KV: no page that it still owns enters the radix tree."""
        self._stop(sequence, 0)

    def _stop(self, sequence: RequestState, sound: int) -> None:
        """Close the lease of a running request. Other requests may read the KV of its first `sound` tokens."""
        assert sequence.lease is not None, "only a running request has a lease"
        self.running.remove(sequence)
        self._cache.close(sequence.lease, sequence.tokens, sound)
        sequence.leave()

    def _prefill_budget(self, plan: Schedule, busiest: int) -> PrefillBudget | None:
        """Set `plan.decode_us`. Return the `PrefillBudget`, or None without a pace or if no group decodes."""
        committed, pace = [s.reach for s, _ in plan.decodes], self._pace
        plan.decode_us = len(committed) if pace is None else int(pace.decoding(committed)) if committed else 0
        return pace.prefill_budget(committed, busiest) if pace is not None and (committed or busiest) else None

    def _room(
        self, plan: Schedule, prefill_budget: PrefillBudget | None, busiest: int, prefilling: int
    ) -> RemainingRows:
        if not plan.decodes and not busiest:  # no stream waits for this step: only the chunk size limits prompts
            return RemainingRows(self._budget)
        if prefill_budget is None or self._pace is None:
            return RemainingRows(self._mixed_budget)
        # Prompt rows take `dearer` times the time that the pace predicts, so the allowance is divided by `dearer`.
        allowance = prefill_budget.allowance / self.correction.dearer.value + self._overdrawn
        return RemainingRows(
            self._mixed_budget, allowance, self._pace, 0.0, len(plan.decodes) * self._pace.tree, prefilling
        )

    def _ride(self, plan: Schedule, sequence: RequestState, room: RemainingRows) -> None:
        """Add the next chunk of a request's prompt to the step, with as many rows as the budget `room` allows."""
        start, end = sequence.reach, len(sequence.tokens)
        if sequence.scores_left(start, end):
            if not room.scored:  # no scored row is left in this step: the request waits for the next one
                return
            end = min(end, start + room.scored)
        stop = start + room.take(start, end)
        if stop > start and sequence.lease is not None:
            scored = sequence.scores_left(start, stop)
            room.scored -= scored
            plan.chunks.append(Chunk(sequence, sequence.lease, start, stop, stop == len(sequence.tokens), scored))

    def _decoding(self) -> list[tuple[RequestState, Lease]]:
        """The requests that decode in the next step, without those that are certain to end in steps in flight."""
        return [(s, s.lease) for s in self.running if s.lease is not None and not (s.prefilling or s.ends)]

    def _make_room(self) -> tuple[list[tuple[RequestState, Lease]], int]:
        """Give every decoding request pages for its window, retracting the requests admitted last if pages run out.

        Returns the requests that decode, and the number retracted.
        """
        retracted = 0
        while True:
            decodes = self._decoding()
            # `reach` bounds the committed tokens from above: results of steps in flight are not known yet.
            reaches = [min(s.reach, s.longest) + self._window_of(s) for s, _ in decodes]
            if self._cache.grow([lease for _, lease in decodes], reaches):
                return decodes, retracted
            self._retract(self.running[-1])
            retracted += 1

    def _window_of(self, sequence: RequestState) -> int:
        """W for this request. A request with a grammar may also have forced nodes, which need more slots."""
        return self._window if sequence.request.params.grammar is None else max(self._window, self._shape.window)

    def _retract(self, sequence: RequestState) -> None:
        self.release(sequence)
        self.waiting.appendleft(sequence)

    def _publish(self) -> None:
        """Put all pages that the last step completed into the radix tree, where other requests find them."""
        for sequence in self.running:
            if sequence.lease is not None:
                self._cache.publish(sequence.lease, sequence.tokens, sequence.committed)

    def _admit_waiting(self, plan: Schedule, room: RemainingRows) -> None:
        """Admit requests in order of arrival, while there are pages and at least one prompt row for each request."""
        coming = {self._next(s) for s in self.running if not s.known} - {None}  # the next pages of running prompts
        spare = sum(map(self._growth, self.running))  # pages that must stay free for running requests
        passed = 0  # number of requests at the front of the queue that wait for a shared prefix
        while room.left and passed < min(len(self.waiting), self._cache.free_rows):
            sequence = self.waiting[passed]
            wanted = self._next(sequence) if coming and sequence.cacheable is None else None
            if wanted is not None and wanted in coming:
                # The request stays in the queue. The pages that it will need beyond the shared ones stay reserved.
                whole = self._cache.pages_for(len(sequence.tokens) + self._window_of(sequence))
                spare += max(0, whole - wanted.entry - self._ahead)
                passed += 1
                continue
            fresh = sequence.cached_tokens is None
            begins = partial(self._cache.most_cached, sequence.tokens, sequence.request.cache_salt, sequence.cacheable)
            if not room.fits(begins) or not self._admit(sequence, spare):
                break  # the first request that does not fit ends admission: no small one may pass it
            del self.waiting[passed]
            spare += self._growth(sequence)
            coming.add(self._next(sequence))
            if fresh:
                plan.fresh.append(sequence)
            plan.admitted.append(sequence)
            self._ride(plan, sequence, room)

    def _next(self, sequence: RequestState) -> Next | None:
        """The pages of the next `WORTH_WAITING` tokens that a request computes, as a key; None if too few remain."""
        return self._cache.next(sequence.tokens, self._ahead, sequence.lease, sequence.request.cache_salt)

    def _growth(self, sequence: RequestState) -> int:
        """The most new pages that a running request can need for its next step. The step that now begins commits at
        most S + 1 tokens, and a request that still runs has at most `longest` committed.
        """
        assert sequence.lease is not None, "only running requests grow"
        if sequence.prefilling:
            most = len(sequence.tokens)
        else:
            most = min(sequence.reach + sequence.most_of(self._shape), sequence.longest)
        return max(0, self._cache.pages_for(most + self._window_of(sequence)) - sequence.lease.pages)

    def _admit(self, sequence: RequestState, spare: int) -> bool:
        """Admit a request if `spare` pages and the pages of its own first window stay free, so that no retraction
        follows in the next step. Return whether it was admitted.
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
    """The sampling mode of a step in which requests with these parameters draw tokens."""
    mode = 0  # a plain int, because `|=` on an `IntFlag` is slow
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
