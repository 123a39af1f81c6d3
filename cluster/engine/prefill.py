"""Schedules prompts: which prompt chunks run in the next step, and which waiting requests are admitted.

- **Budget.** If no request of any group decodes, a step has up to `chunked_prefill_size` prompt rows. Otherwise it has
  up to `mixed_prefill_size`, or without that setting as many as the pace predicts to fit `prefill_share`. A step that
  took more than its allowance leaves less to the next one. Where captured steps have fixed numbers of prompt rows, a
  chunk is rounded down to one, and the rest of the allowance goes to the next step. At most `SCORED_ROWS` rows return
  log-probabilities.
- **Order.** Running prompts get rows first, in order of admission. Then waiting requests are admitted in order of
  arrival, while rows are left. The first request that does not fit ends admission: no small one may pass it.
- **Pages.** A request is admitted if its prompt, its first window and the growth of all running requests fit, so that
  no retraction follows in the next step. After a retraction nobody is admitted in that step.
- **Shared prefixes.** If a running prompt is about to compute the next pages of a waiting request, the waiting request
  stays in the queue until it can share these pages. That delays it by at most one step, because running prompts get
  rows before new requests anyway. The condition is checked again before every step, so the waiting request goes on even
  if the other request is retracted, aborted or ends. Later requests may pass it, but its table row and the pages it
  will need stay reserved.
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
from cluster.kv.cache import KVCache, Next
from cluster.observability.step_times import PrefillBudget, StepTimes

SCORED_ROWS = 512
"""Most prompt rows of a step that return log-probabilities: the logits of all of them are in memory at once."""
WORTH_WAITING = 16
"""A request waits for another prompt only to share at least this many tokens, rounded up to pages. Waiting may cost a
step, and the fixed cost of a step equals that of some rows.
"""


@dataclass(slots=True)
class RemainingRows:
    """What is left of a step's prefill budget: `rows` prompt rows and, if there is a `pace` (see `Schedule`),
    `allowance` microseconds of predicted time.

    `spent` is the predicted time of the chunks so far. `beside` counts the target rows of the step so far. `prefilling`
    is the number of other groups that run prompt rows. `first` is True until a chunk has been taken. The first chunk
    gets at least `StepTimes.least` rows, even if their cost exceeds the allowance; the next step has that much less.
    `scored` is the number of rows that may still return log-probabilities. `sizes` are the numbers of prompt rows, in
    ascending order, whose steps can be captured; `taken` are the prompt rows of the step so far. `rounded` says that a
    chunk was cut to one of `sizes`, so that allowance may be left over for the next step.
    """

    rows: int
    allowance: float = 0.0
    pace: StepTimes | None = None
    spent: float = 0.0
    beside: int = 0
    prefilling: int = 0
    first: bool = True
    scored: int = SCORED_ROWS
    sizes: tuple[int, ...] = ()
    taken: int = 0
    rounded: bool = False

    @property
    def left(self) -> bool:
        """Whether one more prompt row may join the step."""
        return self.rows > 0 and (self.pace is None or self.allowance > 0.0)

    def fits(self, start: Callable[[], int], stop: int) -> bool:
        """Whether `take` would give at least one row to a chunk of tokens `start()` to `stop - 1`. `start` is a
        function, because it is called only if the answer depends on it.
        """
        if not self.left or self.pace is None or self.first:
            return self.left
        return self._granted(self.pace, start(), stop) > 0

    def take(self, start: int, stop: int) -> int:
        """Take as many prompt rows as the budget allows, of `start` to `stop - 1`. Return their number, maybe 0."""
        count = min(stop - start, self.rows)
        if self.pace is not None:
            count, wanted = self._granted(self.pace, start, stop), count
            self.rounded |= bool(self.sizes) and count < wanted
            cost = self.pace.cost(self.beside, start, count, self.prefilling)
            self.allowance, self.spent = self.allowance - cost, self.spent + cost
        self.rows -= count
        self.beside += count
        self.taken += count
        self.first = False
        return count

    def _granted(self, pace: StepTimes, start: int, stop: int) -> int:
        """Return how many rows of `start` to `stop - 1` the budget allows."""
        count = min(stop - start, self.rows)
        affordable = pace.rows(self.beside, start, count, self.allowance, self.prefilling)
        if self.first:  # a chunk reads its whole prefix, so the first chunk gets enough rows to be worth it
            affordable = max(affordable, pace.least(self.beside, start, count, self.prefilling))
        return count if affordable >= count else self._rounded(affordable)

    def _rounded(self, count: int) -> int:
        """Return the most rows, up to `count`, with which the step's prompt rows are one of `sizes`. Less than the
        smallest size and more than the largest are not rounded.
        """
        total = self.taken + count
        if not self.sizes or not self.sizes[0] <= total <= self.sizes[-1]:
            return count
        return max(0, self.sizes[bisect_right(self.sizes, total) - 1] - self.taken)


class PrefillScheduler:
    """The prompts of one rank: of waiting requests, and of the running ones, which `decode` has."""

    def __init__(
        self,
        resolved: ResolvedSettings,
        cache: KVCache,
        decode: DecodeScheduler,
        pace: StepTimes | None,
        chunk_sizes: tuple[int, ...] = (),
    ) -> None:
        """`pace` limits the prompt rows of steps in which requests decode. If it is None, or `mixed_prefill_size` is
        set, only the sizes of the config limit them. Where the pace cuts a chunk, the step gets one of `chunk_sizes`
        prompt rows, if there are any: such steps can be captured.
        """
        self._cache, self._decode, self._waiting = cache, decode, decode.waiting
        self._ahead = cache.pages_for(WORTH_WAITING)  # the pages that two prompts must share for one to wait
        self._budget, self._mixed_budget = resolved.chunk_rows, resolved.mixed_rows
        self._pace = pace if resolved.paced else None
        self._chunk_sizes = chunk_sizes
        self._unspent = 0.0  # microseconds of the last step's allowance; less than 0 if it took more
        self.correction = Correction()

    def schedule(self, schedule: Schedule, busiest: int, prefilling: int) -> None:
        """Add prompt chunks and admitted requests to `schedule`, whose decoding requests are known.

        `busiest` is the largest `decode_us` of other groups, whose requests wait while this group computes prompt rows.
        `prefilling` is the number of other groups that run prompt rows.
        """
        committed, pace, prefill_budget = [s.reach for s, _ in schedule.decodes], self._pace, None
        schedule.decode_us = len(committed) if pace is None else int(pace.decoding(committed)) if committed else 0
        if pace is not None and (committed or busiest):
            prefill_budget = pace.prefill_budget(committed, busiest)
        room = self._room(schedule, prefill_budget, busiest, prefilling)
        for sequence in self._decode.running:
            if sequence.prefilling and room.left:
                self._ride(schedule, sequence, room)
        if self._waiting and not schedule.retracted:  # after a retraction pages are short: admit nobody
            self._admit_waiting(schedule, room)
        self._unspent = room.allowance if room.rounded else min(0.0, room.allowance)
        if prefill_budget is not None:
            schedule.busy_us, schedule.rows_us = prefill_budget.busy, room.spent
        elif pace is not None and schedule.chunks:
            costs = (pace.cost(0, chunk.start, chunk.stop - chunk.start, prefilling) for chunk in schedule.chunks)
            schedule.alone_us = pace.fixed + sum(costs)

    def learn(self, schedule: Schedule, decode_us: int, prompt_rows: int, took_us: float) -> None:
        """Update the correction of the pace by a finished step, which took `took_us`. `decode_us` is the largest of all
        groups, and `prompt_rows` the largest number of prompt rows of any group.
        """
        if self._pace is None:
            return
        if not decode_us:
            telling = schedule.alone_us > 2 * self._pace.fixed  # prompt rows, not the fixed cost, took most of the time
            if telling and schedule.prompt_rows >= prompt_rows:  # otherwise another group determined the time
                self.correction.prefilled(schedule.alone_us, took_us)
        elif not prompt_rows:
            self.correction.decoded(decode_us, took_us)
        elif schedule.rows_us:
            self.correction.prompted(schedule.busy_us, schedule.rows_us, took_us)

    def _room(
        self, schedule: Schedule, prefill_budget: PrefillBudget | None, busiest: int, prefilling: int
    ) -> RemainingRows:
        """Return the step's budget of prompt rows. `prefill_budget` is None without a pace or if no group decodes."""
        if not schedule.decodes and not busiest:  # no stream waits for this step: only the chunk size limits prompts
            return RemainingRows(self._budget)
        if prefill_budget is None or self._pace is None:
            return RemainingRows(self._mixed_budget)
        # Prompt rows take `dearer` times the time that the pace predicts, so the allowance is divided by `dearer`.
        allowance = prefill_budget.allowance / self.correction.dearer.value + self._unspent
        beside = len(schedule.decodes) * self._pace.tree
        return RemainingRows(
            self._mixed_budget, allowance, self._pace, beside=beside, prefilling=prefilling, sizes=self._chunk_sizes
        )

    def _ride(self, schedule: Schedule, sequence: RequestState, room: RemainingRows) -> None:
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
            schedule.chunks.append(Chunk(sequence, sequence.lease, start, stop, stop == len(sequence.tokens), scored))

    def _admit_waiting(self, schedule: Schedule, room: RemainingRows) -> None:
        """Admit requests in order of arrival, while there are pages and at least one prompt row for each request."""
        running = self._decode.running
        coming = {self._next(s) for s in running if not s.known} - {None}  # the next pages of running prompts
        spare = sum(map(self._decode.growth, running))  # pages that must stay free for running requests
        passed = 0  # number of requests at the front of the queue that wait for a shared prefix
        while room.left and passed < min(len(self._waiting), self._cache.free_rows):
            sequence = self._waiting[passed]
            wanted = self._next(sequence) if coming and sequence.cacheable is None else None
            if wanted is not None and wanted in coming:
                # The request stays in the queue. The pages that it will need beyond the shared ones stay reserved.
                whole = self._cache.pages_for(len(sequence.tokens) + self._decode.window_of(sequence))
                spare += max(0, whole - wanted.entry - self._ahead)
                passed += 1
                continue
            fresh = sequence.cached_tokens is None
            begins = partial(self._cache.most_cached, sequence.tokens, sequence.request.cache_salt, sequence.cacheable)
            if not room.fits(begins, len(sequence.tokens)) or not self._admit(sequence, spare):
                break  # the first request that does not fit ends admission: no small one may pass it
            del self._waiting[passed]
            spare += self._decode.growth(sequence)
            coming.add(self._next(sequence))
            if fresh:
                schedule.fresh.append(sequence)
            schedule.admitted.append(sequence)
            self._ride(schedule, sequence, room)

    def _next(self, sequence: RequestState) -> Next | None:
        """The pages of the next `WORTH_WAITING` tokens that a request computes, as a key; None if too few remain."""
        return self._cache.next(sequence.tokens, self._ahead, sequence.lease, sequence.request.cache_salt)

    def _admit(self, sequence: RequestState, spare: int) -> bool:
        """Admit a request if `spare` pages and the pages of its own first window stay free, so that no retraction
        follows in the next step. Return whether it was admitted.
        """
        known = len(sequence.tokens)
        window = self._cache.pages_for(known + self._decode.window_of(sequence)) - self._cache.pages_for(known)
        salt, most = sequence.request.cache_salt, sequence.cacheable
        lease = self._cache.open(sequence.tokens, known, spare + window, salt, most)
        if lease is None:
            return False
        sequence.join(lease)
        self._decode.running.append(sequence)
        return True
