"""Schedules prompts: which prompt chunks run in the next step, and which waiting requests are admitted.

- **Budget.** If no request of any group decodes, a step has up to `chunked_prefill_size` prompt rows. Otherwise it has
  up to `mixed_prefill_size`. Without that setting, times are predicted by the pace (`StepTimes`), and the step has as
  many prompt rows as take at most `prefill_share` of its time: this time is the allowance. If the first chunk is
  predicted to take more than the allowance, the next step's allowance is smaller by the excess. If steps are captured
  only with certain numbers of prompt rows (`chunk_sizes`), a chunk that the allowance cuts is cut further, so that the
  step has such a number; the rest of the allowance goes to the next step. At most `SCORED_ROWS` rows of a step return
  log-probabilities of prompt tokens.
- **Order.** Running prompts get rows first, in order of admission. Then waiting requests are admitted in order of
  arrival, while rows are left. The first request that does not fit ends admission: no smaller one behind may pass it.
- **Pages.** A request is admitted if there are pages for its prompt, for its first window (the slots that its first
  decoding step may write) and for the growth of all running requests, so that no retraction follows in the next step.
  A step that retracts a request admits none.
- **Shared prefixes.** If a running prompt is about to compute the next pages of a waiting request, the waiting request
  stays in the queue until it can share these pages. This usually delays it by one step at most: a running prompt takes
  all rows that it may, so none is left for a new request before the step in which that prompt ends. (A prompt that
  returns log-probabilities takes at most `SCORED_ROWS` rows per step, so others may wait for it longer.) The condition
  is checked again before every step, so the waiting request is admitted later even if the other request is retracted,
  aborted or ends. Later requests may pass it, but its table row and the pages that it will need stay reserved.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cluster.config.resolved import ResolvedSettings
from cluster.engine.decode import DecodeScheduler
from cluster.engine.pace_correction import Correction
from cluster.engine.request_state import RequestState
from cluster.engine.schedule import Chunk, Schedule
from cluster.kv.cache import KVCache, NextPages
from cluster.observability.step_times import PrefillBudget, StepTimes

SCORED_ROWS = 512
"""The largest number of prompt rows of a step that return log-probabilities: the logits of all these rows are in memory
at once.
"""
MIN_SHARED_TOKENS = 16
"""A request waits for another prompt only to share at least this many tokens, rounded up to pages. Waiting may cost a
step, whose fixed cost is as high as the cost of several rows: to save only a few rows, waiting would not pay.
"""


@dataclass(slots=True)
class RemainingRows:
    """What is left of a step's prefill budget: `rows` prompt rows and, if there is a `pace` (see `Schedule`),
    `allowance` microseconds of predicted time.

    `spent_us` is the predicted time of the chunks so far. `target_rows` counts the rows of the step's target forward so
    far, tree nodes and prompt rows. `prefilling_groups` is the number of other groups that run prompt rows.
    `is_first_chunk` is True until a chunk has been taken. The first chunk gets at least `StepTimes.min_rows` rows
    (before they are rounded down to one of `chunk_sizes`), even if they cost more than the allowance; the next step's
    allowance is then smaller by the excess. `scored_rows` is the number of rows that may still return
    log-probabilities. `chunk_sizes` lists, in ascending order, the numbers of prompt rows with which a step can be
    captured; `prompt_rows` is the number of prompt rows in this step so far. If there are `chunk_sizes`, `is_rounded`
    becomes True when the allowance cuts a chunk. What is left of the allowance then goes to the next step.
    """

    rows: int
    allowance: float = 0.0
    pace: StepTimes | None = None
    spent_us: float = 0.0
    target_rows: int = 0
    prefilling_groups: int = 0
    is_first_chunk: bool = True
    scored_rows: int = SCORED_ROWS
    chunk_sizes: tuple[int, ...] = ()
    prompt_rows: int = 0
    is_rounded: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether one more prompt row may join the step."""
        return self.rows > 0 and (self.pace is None or self.allowance > 0.0)

    def fits(self, start: Callable[[], int], stop: int) -> bool:
        """Whether `take` would give at least one row to a chunk of tokens `start()` to `stop - 1`. `start` is a
        function, because it is called only if the answer depends on it.
        """
        if not self.has_rows or self.pace is None or self.is_first_chunk:
            return self.has_rows
        return self._allowed_rows(self.pace, start(), stop) > 0

    def take(self, start: int, stop: int) -> int:
        """Take as many of the prompt rows `start` to `stop - 1` as the budget allows. Return the number of rows taken,
        which may be 0.
        """
        count = min(stop - start, self.rows)
        if self.pace is not None:
            requested_rows, count = count, self._allowed_rows(self.pace, start, stop)
            self.is_rounded |= bool(self.chunk_sizes) and count < requested_rows
            cost_us = self.pace.cost(self.target_rows, start, count, self.prefilling_groups)
            self.allowance, self.spent_us = self.allowance - cost_us, self.spent_us + cost_us
        self.rows -= count
        self.target_rows += count
        self.prompt_rows += count
        self.is_first_chunk = False
        return count

    def _allowed_rows(self, pace: StepTimes, start: int, stop: int) -> int:
        """Return how many rows of `start` to `stop - 1` the budget allows."""
        count = min(stop - start, self.rows)
        affordable_rows = pace.max_rows(self.target_rows, start, count, self.allowance, self.prefilling_groups)
        # A chunk reads the KV of its whole prefix. The first chunk gets so many rows that this is a small part of its
        # cost.
        if self.is_first_chunk:
            min_rows = pace.min_rows(self.target_rows, start, count, self.prefilling_groups)
            affordable_rows = max(affordable_rows, min_rows)
        return count if affordable_rows >= count else self._rounded_rows(affordable_rows)

    def _rounded_rows(self, count: int) -> int:
        """Return the largest number of rows, up to `count`, that brings the step's number of prompt rows to one of
        `chunk_sizes`, or 0. Return `count` itself if `count` rows bring it below the smallest or above the largest of
        these sizes.
        """
        total = self.prompt_rows + count
        if not self.chunk_sizes or not self.chunk_sizes[0] <= total <= self.chunk_sizes[-1]:
            return count
        return max(0, self.chunk_sizes[bisect_right(self.chunk_sizes, total) - 1] - self.prompt_rows)


class PrefillScheduler:
    """Schedules the prompts of one rank's waiting and running requests. The `DecodeScheduler` keeps both lists."""

    def __init__(
        self,
        resolved: ResolvedSettings,
        cache: KVCache,
        decode: DecodeScheduler,
        pace: StepTimes | None,
        chunk_sizes: tuple[int, ...] = (),
    ) -> None:
        """`pace` limits the prompt rows of steps in which requests decode. If it is None, or `mixed_prefill_size` is
        set, only `chunked_prefill_size` and `mixed_prefill_size` limit them. `chunk_sizes` are the numbers of prompt
        rows with which a step can be captured. If the pace cuts a chunk, the chunk is cut further, so that the step has
        one of these numbers.
        """
        self._cache, self._decode, self._waiting = cache, decode, decode.waiting
        self._shared_pages = cache.pages_for(MIN_SHARED_TOKENS)  # the pages that two prompts must share for one to wait
        self._max_rows, self._max_mixed_rows = resolved.chunk_rows, resolved.mixed_chunk_rows
        self._pace = pace if resolved.prefill_time_limited else None
        self._chunk_sizes = chunk_sizes
        self._unspent_us = 0.0  # what is left of the last step's allowance; less than 0 if the step took more
        self.correction = Correction()

    def schedule(self, schedule: Schedule, max_decode_us: int, prefilling_groups: int) -> None:
        """Add prompt chunks and admitted requests to `schedule`, whose decoding requests are known.

        `max_decode_us` is the largest `decode_us` of other groups, whose requests wait while this group computes prompt
        rows. `prefilling_groups` is the number of other groups that run prompt rows.
        """
        committed_tokens, pace, prefill_budget = (
            [request.max_committed for request, _ in schedule.decodes],
            self._pace,
            None,
        )
        schedule.decode_us = (
            len(committed_tokens) if pace is None else int(pace.decoding(committed_tokens)) if committed_tokens else 0
        )
        if pace is not None and (committed_tokens or max_decode_us):
            prefill_budget = pace.prefill_budget(committed_tokens, max_decode_us)
        remaining_rows = self._remaining_rows(schedule, prefill_budget, max_decode_us, prefilling_groups)
        for sequence in self._decode.running:
            if sequence.prefilling and remaining_rows.has_rows:
                self._add_chunk(schedule, sequence, remaining_rows)
        if self._waiting and not schedule.retracted_count:  # after a retraction pages are short: admit nobody
            self._admit_waiting(schedule, remaining_rows)
        unspent_us = remaining_rows.allowance
        self._unspent_us = unspent_us if remaining_rows.is_rounded else min(0.0, unspent_us)
        if prefill_budget is not None:
            schedule.mixed_decode_us, schedule.prompt_us = prefill_budget.busy, remaining_rows.spent_us
        elif pace is not None and schedule.chunks:
            chunk_costs = (
                pace.cost(0, chunk.start, chunk.stop - chunk.start, prefilling_groups) for chunk in schedule.chunks
            )
            schedule.prefill_us = pace.fixed + sum(chunk_costs)

    def learn(self, schedule: Schedule, decode_us: int, prompt_rows: int, measured_us: float) -> None:
        """Update the correction of the pace by a finished step, which took `measured_us`. `decode_us` is the largest
        `Schedule.decode_us` of all groups, and `prompt_rows` the largest number of prompt rows of any group.
        """
        if self._pace is None:
            return
        if not decode_us:
            # Learn only from steps in which prompt rows, not the fixed cost, are predicted to take most of the time.
            is_significant = schedule.prefill_us > 2 * self._pace.fixed
            if is_significant and schedule.prompt_rows >= prompt_rows:  # otherwise another group determined the time
                self.correction.observe_prefill(schedule.prefill_us, measured_us)
        elif not prompt_rows:
            self.correction.observe_decode(decode_us, measured_us)
        elif schedule.prompt_us:
            self.correction.observe_mixed(schedule.mixed_decode_us, schedule.prompt_us, measured_us)

    def _remaining_rows(
        self, schedule: Schedule, prefill_budget: PrefillBudget | None, max_decode_us: int, prefilling_groups: int
    ) -> RemainingRows:
        """Return the step's budget of prompt rows. `prefill_budget` is None without a pace or if no group decodes."""
        # If no group decodes, no stream waits for this step, and only `chunked_prefill_size` limits prompts.
        if not schedule.decodes and not max_decode_us:
            return RemainingRows(self._max_rows)
        if prefill_budget is None or self._pace is None:
            return RemainingRows(self._max_mixed_rows)
        # Prompt rows take `prompt_drift` times the time that the pace predicts, so the allowance is divided by it.
        allowance = prefill_budget.allowance / self.correction.prompt_drift.value + self._unspent_us
        decode_rows = len(schedule.decodes) * self._pace.tree
        return RemainingRows(
            self._max_mixed_rows,
            allowance,
            self._pace,
            target_rows=decode_rows,
            prefilling_groups=prefilling_groups,
            chunk_sizes=self._chunk_sizes,
        )

    def _add_chunk(self, schedule: Schedule, sequence: RequestState, remaining_rows: RemainingRows) -> None:
        """Add the next chunk of a request's prompt to the step, with as many rows as `remaining_rows` allows."""
        start, end = sequence.max_committed, len(sequence.tokens)
        if sequence.missing_scores(start, end):
            if not remaining_rows.scored_rows:  # no scored row is left in this step: the request waits for the next one
                return
            end = min(end, start + remaining_rows.scored_rows)
        stop = start + remaining_rows.take(start, end)
        if stop > start and sequence.lease is not None:
            scored = sequence.missing_scores(start, stop)
            remaining_rows.scored_rows -= scored
            self._cache.cover(sequence.lease, stop)
            schedule.chunks.append(Chunk(sequence, sequence.lease, start, stop, stop == len(sequence.tokens), scored))

    def _admit_waiting(self, schedule: Schedule, remaining_rows: RemainingRows) -> None:
        """Admit requests in order of arrival, while there are pages and at least one prompt row for each request."""
        running = self._decode.running
        # The pages that running prompts will compute next.
        upcoming_pages = {self._next_pages(request) for request in running if not request.prompt_committed} - {None}
        reserved_pages = sum(map(self._decode.max_new_pages, running))  # pages that must stay free for running requests
        skipped = 0  # number of requests at the front of the queue that wait for a shared prefix
        while remaining_rows.has_rows and skipped < min(len(self._waiting), self._cache.free_rows):
            sequence = self._waiting[skipped]
            next_pages = self._next_pages(sequence) if upcoming_pages and sequence.max_cached_tokens is None else None
            if next_pages is not None and next_pages in upcoming_pages:
                # The request stays in the queue. The pages that it will need beyond the shared ones stay reserved.
                page_count = self._cache.pages_for(len(sequence.tokens) + self._decode.window_of(sequence))
                reserved_pages += max(0, page_count - next_pages.first_index - self._shared_pages)
                skipped += 1
                continue
            is_first_admission = sequence.cached_tokens is None
            cached_start = partial(
                self._cache.max_cached_tokens, sequence.tokens, sequence.request.cache_salt, sequence.max_cached_tokens
            )
            if not remaining_rows.fits(cached_start, len(sequence.tokens)) or not self._admit(sequence, reserved_pages):
                break  # the first request that does not fit ends admission: no small one may pass it
            del self._waiting[skipped]
            reserved_pages += self._decode.max_new_pages(sequence)
            upcoming_pages.add(self._next_pages(sequence))
            if is_first_admission:
                schedule.first_admitted.append(sequence)
            schedule.admitted.append(sequence)
            self._add_chunk(schedule, sequence, remaining_rows)

    def _next_pages(self, sequence: RequestState) -> NextPages | None:
        """Return a key for the next pages that a request will compute, which hold at least `MIN_SHARED_TOKENS` tokens.
        Two requests with equal keys would compute the same pages. Return None if too few tokens remain, or if requests
        share no pages.
        """
        return self._cache.next_pages(sequence.tokens, self._shared_pages, sequence.lease, sequence.request.cache_salt)

    def _admit(self, sequence: RequestState, reserved_pages: int) -> bool:
        """Admit a request if `reserved_pages` pages and the pages of its own first window stay free, so that no
        retraction follows in the next step. Return whether it was admitted.
        """
        token_count = len(sequence.tokens)
        window_pages = self._cache.pages_for(token_count + self._decode.window_of(sequence)) - self._cache.pages_for(
            token_count
        )
        limits = sequence.request.cache_salt, sequence.max_cached_tokens, sequence.max_tokens
        lease = self._cache.open(sequence.tokens, token_count, reserved_pages + window_pages, *limits)
        if lease is None:
            return False
        sequence.attach(lease)
        self._decode.running.append(sequence)
        return True
