"""Predicts when a rank will have computed a prompt, by simulating the rank's queue by the rules of
`engine/prefill.py`.

A rank serves its requests in order of arrival. To begin, a request needs a slot of the rank and KV for its prompt.
Running requests take more KV as they grow, and return slot and KV when they end. The rows of a prompt are computed
after the rows of all earlier prompts, at the speed of `PrefillSpeed`.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cluster.actors.prefill_speed import PrefillSpeed, PromptSeconds


class RunningRequest(NamedTuple):
    """A running request that ends at the time `ends`. Until then its KV grows by `grows` tokens/s, up to `tokens`."""

    ends: float
    tokens: float
    grows: float


class QueuedPrompt(NamedTuple):
    """A request without a token yet. `rows` prompt rows are left to compute, after `start` computed tokens. The request
    takes `tokens` tokens of KV when it begins, and gets `more` tokens after its first token.
    """

    start: int
    rows: int
    tokens: float
    more: float


class ExpectedWait(NamedTuple):
    """The expected wait for a first token: `seconds` in all, of which the first `delay` are spent on other requests."""

    seconds: float
    delay: float


class DecodeIntervals:
    """The times when any request of the gang decodes: sorted, disjoint intervals, in seconds from now."""

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

    def at(self, time: float) -> bool:
        """Return whether any request decodes at `time`."""
        next_one = bisect_right(self._ends, time)
        return next_one < len(self._ends) and self._begins[next_one] <= time

    def until(self, time: float) -> float:
        """Return the end of the decode interval that contains `time`, or `time` itself if no request decodes then."""
        return self._ends[bisect_right(self._ends, time)] if self.at(time) else time

    def finished(self, time: float, takes: PromptSeconds) -> float:
        """Return when a prompt is completely computed if its first row begins at `time`."""
        left = 1.0  # the share of the prompt that is not computed yet
        # Walk the gaps, at the speed `alone`, and the intervals of decoding, at the speed `beside`.
        for at in range(bisect_right(self._ends, time), len(self._ends)):
            begins, ends = self._begins[at], self._ends[at]
            if begins > time:
                if begins - time >= left * takes.alone:
                    break
                left -= (begins - time) / takes.alone
                time = begins + takes.late
            if ends - time >= left * takes.beside:
                return time + left * takes.beside
            if ends > time:
                left -= (ends - time) / takes.beside
                time = ends
        return time + left * takes.alone


@dataclass(slots=True)
class RankForecast:
    """The simulation of one rank. Times are in seconds from now (0.0).

    `slots` and `kv` (tokens) are free at the simulated time; `free` slots are free at 0.0. `spare` tokens of KV must
    stay free per running request. `ends` is a heap of the running requests. `per_s(n)` is the tokens/s of each request
    if n requests run. `rows` is the sum of the prompt rows of all waiting requests. `waiting` requests were added to
    the simulation so far; `first` is the first of them. `clock` is the time at which all added prompts are computed; it
    starts below 0.0 if the rank began its first prompt before now.
    """

    speed: PrefillSpeed
    slots: int
    kv: float
    spare: float
    per_s: Callable[[int], float]
    ends: list[RunningRequest]
    clock: float = 0.0
    rows: int = 0
    first: QueuedPrompt | None = None
    waiting: int = 0
    free: int = 0
    grown: float = 0.0  # until when `kv` counts the growth of running requests
    growth: float = 0.0  # of all running requests, in tokens a second

    def __post_init__(self) -> None:
        self.free = self.slots
        self.growth = sum(one.grows for one in self.ends)
        heapq.heapify(self.ends)

    def add(self, prompt: QueuedPrompt, decoding: DecodeIntervals) -> None:
        """Queue a request behind the others, and add the interval in which the request will decode to `decoding`."""
        self.first = self.first or prompt
        self.waiting += 1
        self._begin(prompt)
        self.slots -= 1
        self.kv -= prompt.tokens
        self.clock = max(0.0, self._computed(prompt, decoding))
        self._advance(self.clock)
        ends = self.clock + prompt.more / self.per_s(len(self.ends) + 1)
        decoding.add(self.clock, ends)
        took = max(ends - self.grown, 1e-6)
        self.growth += prompt.more / took
        heapq.heappush(self.ends, RunningRequest(ends, prompt.tokens + prompt.more, prompt.more / took))

    def wait(self, prompt: QueuedPrompt, decoding: DecodeIntervals) -> ExpectedWait:
        """Return the expected wait of a request that comes now; change nothing."""
        if (passes_s := self._passes_s(prompt, decoding)) is not None:
            return ExpectedWait(passes_s, passes_s)
        newcomer = replace(self, ends=[*self.ends], rows=self.rows + prompt.rows)
        newcomer._begin(prompt)
        delay = max(0.0, newcomer.clock)
        step = self.speed.step_s(prompt.start, prompt.rows, decoding.at(delay))
        # The request joins the next step, and on average half of the present step is left.
        return ExpectedWait(max(newcomer._computed(prompt, decoding), step) + step / 2, delay)

    def _passes_s(self, prompt: QueuedPrompt, decoding: DecodeIntervals) -> float | None:
        """Return when a request that comes now gets its first token if its prompt overtakes the first prompt, or None
        if it cannot overtake.

        While requests decode, a step has a time budget for prompt rows. What the first prompt leaves of the budget is
        too little for one more of its rows. It may be enough for rows of a later prompt, which are cheaper because
        fewer tokens precede them.
        """
        if self.first is None or self.waiting >= self.free:
            return None
        step, rows = self.speed.passing(self.first.start)
        if not rows:
            return None
        behind = self.rows - self.first.rows + prompt.rows
        seconds = max(1.0, behind / rows) * step
        # Half of that time is enough: how long requests decode is a guess, and a false refusal is the worse error.
        return seconds + step / 2 if 2 * decoding.until(0.0) > seconds else None

    def _computed(self, prompt: QueuedPrompt, decoding: DecodeIntervals) -> float:
        """Return when `prompt`, which begins at `clock`, is completely computed."""
        return decoding.finished(self.clock, self.speed.seconds(prompt.start, prompt.rows, self.rows))

    def _begin(self, prompt: QueuedPrompt) -> None:
        """Advance `clock` until there is a slot and enough KV for a request."""
        self._advance(self.clock)
        while self.ends and (self.slots < 1 or self.kv < prompt.tokens + self.spare * len(self.ends)):
            self.clock = max(self.clock, self.ends[0].ends)
            self._advance(self.ends[0].ends)

    def _advance(self, to: float) -> None:
        """Simulate the growth and the ends of running requests until `to`."""
        while self.ends and self.ends[0].ends <= to:
            self._grow(self.ends[0].ends)
            one = heapq.heappop(self.ends)
            self.kv += one.tokens
            self.growth -= one.grows
            self.slots += 1
        self._grow(to)

    def _grow(self, to: float) -> None:
        if to > self.grown:
            self.kv -= self.growth * (to - self.grown)
            self.grown = to


class GangForecast:
    """The simulation of all ranks of a gang. `made` is the time of the caller's clock that the simulation calls 0.0."""

    def __init__(self, ranks: Sequence[RankForecast], queues: Sequence[Sequence[QueuedPrompt]], made: float) -> None:
        """`queues` holds the waiting requests of each rank, in order."""
        self.ranks, self.made = ranks, made
        self._decoding = DecodeIntervals()
        self._decoding.add(
            min(0.0, *(rank.clock for rank in ranks)),
            max((end.ends for rank in ranks for end in rank.ends), default=0.0),
        )
        waiting = [deque(queue) for queue in queues]
        # Always advance the rank that is furthest behind in time: its decoding slows the prompts of the others.
        while left := [at for at, queue in enumerate(waiting) if queue]:
            first = min(left, key=lambda at: ranks[at].clock)
            ranks[first].add(waiting[first].popleft(), self._decoding)

    def add(self, rank: int, prompt: QueuedPrompt) -> None:
        """Queue a request at a rank, behind the others."""
        self.ranks[rank].rows += prompt.rows
        self.ranks[rank].add(prompt, self._decoding)

    def wait(self, rank: int, prompt: QueuedPrompt, now: float) -> ExpectedWait:
        """Return the expected wait of a request that arrives at a rank at the time `now`, by the caller's clock."""
        found, age = self.ranks[rank].wait(prompt, self._decoding), now - self.made
        return ExpectedWait(max(0.0, found.seconds - age), max(0.0, found.delay - age))
