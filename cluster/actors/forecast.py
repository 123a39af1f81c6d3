"""Predicts when a rank will have computed a prompt: simulates the rank's queue by the rules of `engine/prefill.py`.

A rank serves its requests in order of arrival. To begin, a request needs one of the rank's `max_running_requests` slots
and free KV for its prompt. Running requests take more KV as they grow, and return their slot and KV when they end. The
rows of a prompt are computed after the rows of all earlier prompts, at the speed of `PrefillSpeed`.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cluster.actors.prefill_speed import PrefillSpeed, PromptSeconds


class RunningRequest(NamedTuple):
    """A running request that ends at the time `ends_at`. Until then its KV grows by `kv_tokens_per_s` tokens/s, up to
    `kv_tokens`.
    """

    ends_at: float
    kv_tokens: float
    kv_tokens_per_s: float


class QueuedPrompt(NamedTuple):
    """A request without a token yet. `uncomputed_rows` prompt rows are left to compute, after `computed_tokens`
    computed tokens. The request takes `kv_tokens` tokens of KV when it begins, and gets `later_tokens` tokens after its
    first token.
    """

    computed_tokens: int
    uncomputed_rows: int
    kv_tokens: float
    later_tokens: float


class ExpectedWait(NamedTuple):
    """The expected wait for a first token: `seconds` in all, of which the first `delay_by_others` are spent on other
    requests.
    """

    seconds: float
    delay_by_others: float


class DecodeIntervals:
    """The times when at least one request of the gang decodes: sorted, disjoint intervals, in seconds from now."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def add(self, begins: float, ends: float) -> None:
        """Add the interval in which a request decodes."""
        if ends <= begins:
            return
        # Intervals `first` to `last` - 1 touch the new one: merge them into it.
        first, last = bisect_left(self._ends, begins), bisect_right(self._begins, ends)
        if first < last:
            begins, ends = min(begins, self._begins[first]), max(ends, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begins], [ends]

    def contains(self, time: float) -> bool:
        """Return whether at least one request decodes at `time`."""
        index = bisect_right(self._ends, time)
        return index < len(self._ends) and self._begins[index] <= time

    def end_of_interval(self, time: float) -> float:
        """Return the end of the decode interval that contains `time`, or `time` itself if no request decodes then."""
        return self._ends[bisect_right(self._ends, time)] if self.contains(time) else time

    def prompt_end(self, time: float, durations: PromptSeconds) -> float:
        """Return when a prompt is completely computed if its first row begins at `time`."""
        remaining_share = 1.0  # the share of the prompt that is not computed yet
        # Between the intervals the whole prompt would take `without_decodes` seconds, within them `with_decodes`.
        for index in range(bisect_right(self._ends, time), len(self._ends)):
            begins, ends = self._begins[index], self._ends[index]
            if begins > time:
                if begins - time >= remaining_share * durations.without_decodes:
                    break
                remaining_share -= (begins - time) / durations.without_decodes
                time = begins + durations.decode_delay_s
            if ends - time >= remaining_share * durations.with_decodes:
                return time + remaining_share * durations.with_decodes
            if ends > time:
                remaining_share -= (ends - time) / durations.with_decodes
                time = ends
        return time + remaining_share * durations.without_decodes


@dataclass(slots=True)
class RankForecast:
    """The simulation of one rank. Times are in seconds from now (0.0).

    `slots` slots and KV for `free_kv_tokens` tokens are free at the simulated time; `initially_free_slots` slots are
    free at 0.0. KV for `kv_reserve` tokens must stay free per running request. `running` is a heap of the running
    requests. `tokens_per_s(n)` is the tokens/s of each request if n requests run. `queued_rows` is the sum of the
    prompt rows of all waiting requests. `num_waiting` requests were added to the simulation so far; `first_prompt` is
    the first of them. `computed_at` is the time at which all added prompts are computed; it starts below 0.0 if the
    rank began its first prompt before now.
    """

    speed: PrefillSpeed
    slots: int
    free_kv_tokens: float
    kv_reserve: float
    tokens_per_s: Callable[[int], float]
    running: list[RunningRequest]
    computed_at: float = 0.0
    queued_rows: int = 0
    first_prompt: QueuedPrompt | None = None
    num_waiting: int = 0
    initially_free_slots: int = 0
    grown_until: float = 0.0  # until when `free_kv_tokens` counts the growth of running requests
    growth_per_s: float = 0.0  # of all running requests, in tokens a second

    def __post_init__(self) -> None:
        self.initially_free_slots = self.slots
        self.growth_per_s = sum(request.kv_tokens_per_s for request in self.running)
        heapq.heapify(self.running)

    def add(self, prompt: QueuedPrompt, decoding: DecodeIntervals) -> None:
        """Queue a request behind the others, and simulate until its prompt is computed. Add the interval in which the
        request will decode to `decoding`.
        """
        self.first_prompt = self.first_prompt or prompt
        self.num_waiting += 1
        self._begin(prompt)
        self.slots -= 1
        self.free_kv_tokens -= prompt.kv_tokens
        self.computed_at = max(0.0, self._completion_time(prompt, decoding))
        self._advance(self.computed_at)
        ends_at = self.computed_at + prompt.later_tokens / self.tokens_per_s(len(self.running) + 1)
        decoding.add(self.computed_at, ends_at)
        growing_s = max(ends_at - self.grown_until, 1e-6)
        self.growth_per_s += prompt.later_tokens / growing_s
        heapq.heappush(
            self.running,
            RunningRequest(ends_at, prompt.kv_tokens + prompt.later_tokens, prompt.later_tokens / growing_s),
        )

    def wait(self, prompt: QueuedPrompt, decoding: DecodeIntervals) -> ExpectedWait:
        """Return the expected wait of a request that comes at 0.0; change nothing."""
        if (overtaking_s := self._overtaking_wait_s(prompt, decoding)) is not None:
            return ExpectedWait(overtaking_s, overtaking_s)
        simulation = replace(self, running=[*self.running], queued_rows=self.queued_rows + prompt.uncomputed_rows)
        simulation._begin(prompt)
        delay_by_others = max(0.0, simulation.computed_at)
        step_s = self.speed.step_s(prompt.computed_tokens, prompt.uncomputed_rows, decoding.contains(delay_by_others))
        # The request joins the next step. When it comes, on average half of the present step is left.
        return ExpectedWait(max(simulation._completion_time(prompt, decoding), step_s) + step_s / 2, delay_by_others)

    def _overtaking_wait_s(self, prompt: QueuedPrompt, decoding: DecodeIntervals) -> float | None:
        """Return the seconds until a request that comes now gets its first token, if its prompt overtakes the first
        prompt of the queue. Return None if it cannot overtake.

        While requests decode, a step has a time budget for prompt rows. The part that the first prompt leaves unused is
        too small for one more of its own rows. It may be enough for rows of a later prompt, which are cheaper because
        fewer tokens precede them.
        """
        if self.first_prompt is None or self.num_waiting >= self.initially_free_slots:
            return None
        step_s, rows_per_step = self.speed.overtaking_rows(self.first_prompt.computed_tokens)
        if not rows_per_step:
            return None
        rows_ahead = self.queued_rows - self.first_prompt.uncomputed_rows + prompt.uncomputed_rows
        seconds = max(1.0, rows_ahead / rows_per_step) * step_s
        # The prompt can overtake only while requests decode. Half of `seconds` is enough here: how long they decode is
        # a guess, and to refuse a request by mistake is worse than to admit it by mistake.
        return seconds + step_s / 2 if 2 * decoding.end_of_interval(0.0) > seconds else None

    def _completion_time(self, prompt: QueuedPrompt, decoding: DecodeIntervals) -> float:
        """Return when `prompt`, which begins at `computed_at`, is completely computed."""
        return decoding.prompt_end(
            self.computed_at, self.speed.seconds(prompt.computed_tokens, prompt.uncomputed_rows, self.queued_rows)
        )

    def _begin(self, prompt: QueuedPrompt) -> None:
        """Advance `computed_at` until there are a slot and enough KV for `prompt`, or until no request runs."""
        self._advance(self.computed_at)
        while self.running and (
            self.slots < 1 or self.free_kv_tokens < prompt.kv_tokens + self.kv_reserve * len(self.running)
        ):
            self.computed_at = max(self.computed_at, self.running[0].ends_at)
            self._advance(self.running[0].ends_at)

    def _advance(self, time: float) -> None:
        """Simulate the growth and the ends of running requests until `time`."""
        while self.running and self.running[0].ends_at <= time:
            self._grow(self.running[0].ends_at)
            ended = heapq.heappop(self.running)
            self.free_kv_tokens += ended.kv_tokens
            self.growth_per_s -= ended.kv_tokens_per_s
            self.slots += 1
        self._grow(time)

    def _grow(self, time: float) -> None:
        if time > self.grown_until:
            self.free_kv_tokens -= self.growth_per_s * (time - self.grown_until)
            self.grown_until = time


class GangForecast:
    """The simulation of all ranks of a gang. Its time 0.0 is `made_at` by the caller's clock."""

    def __init__(self, ranks: Sequence[RankForecast], queues: Sequence[Sequence[QueuedPrompt]], made_at: float) -> None:
        """`queues` holds the waiting requests of each rank, in order; all are added to the simulations."""
        self.ranks, self.made_at = ranks, made_at
        self._decoding = DecodeIntervals()
        self._decoding.add(
            min(0.0, *(rank.computed_at for rank in ranks)),
            max((request.ends_at for rank in ranks for request in rank.running), default=0.0),
        )
        waiting = [deque(queue) for queue in queues]
        # Always continue with the rank whose simulated time is earliest: when its requests decode, the prompts of the
        # other ranks take longer.
        while nonempty := [rank_index for rank_index, queue in enumerate(waiting) if queue]:
            earliest = min(nonempty, key=lambda rank_index: ranks[rank_index].computed_at)
            ranks[earliest].add(waiting[earliest].popleft(), self._decoding)

    def add(self, rank: int, prompt: QueuedPrompt) -> None:
        """Queue a request at a rank, behind the others."""
        self.ranks[rank].queued_rows += prompt.uncomputed_rows
        self.ranks[rank].add(prompt, self._decoding)

    def wait(self, rank: int, prompt: QueuedPrompt, now: float) -> ExpectedWait:
        """Return the expected wait of a request that arrives at a rank at the time `now`, by the caller's clock."""
        expected, age_s = self.ranks[rank].wait(prompt, self._decoding), now - self.made_at
        return ExpectedWait(max(0.0, expected.seconds - age_s), max(0.0, expected.delay_by_others - age_s))
