"""When a rank will have computed a prompt: its queue, run ahead in time by the rules of `engine/scheduler.py`.

A rank serves its requests in the order in which they came. To begin, a request needs one of the rank's slots and KV
pages for its prompt; running requests give both back when they end, and take more pages as they grow. The rows of its
prompt are then computed after those of the prompts before it, as fast as `PrefillSpeed` says.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cluster.actors.prefill_speed import PrefillSpeed, PromptSeconds


class RunningRequest(NamedTuple):
    """A running request: it ends at `ends`. Until then its KV grows by `grows` tokens a second, to `tokens`."""

    ends: float
    tokens: float
    grows: float


class QueuedPrompt(NamedTuple):
    """A request without a token: `rows` prompt rows are left to compute after `start` tokens. It takes the KV of
    `tokens` tokens when it begins, and gets `more` tokens after its first one.
    """

    start: int
    rows: int
    tokens: float
    more: float


class ExpectedWait(NamedTuple):
    """A request gets its first token after `seconds`. The first `delay` of them it waits for earlier requests."""

    seconds: float
    delay: float


class DecodeIntervals:
    """When some request of the gang decodes: intervals in order, none of which touches another."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def add(self, begins: float, ends: float) -> None:
        """A request decodes from `begins` to `ends`."""
        if ends <= begins:
            return
        first, last = bisect_left(self._ends, begins), bisect_right(self._begins, ends)
        if first < last:
            begins, ends = min(begins, self._begins[first]), max(ends, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begins], [ends]

    def at(self, time: float) -> bool:
        """Whether some request decodes then."""
        next_one = bisect_right(self._ends, time)
        return next_one < len(self._ends) and self._begins[next_one] <= time

    def until(self, time: float) -> float:
        """Until when requests decode without a pause from `time` on; `time` itself where none decodes then."""
        return self._ends[bisect_right(self._ends, time)] if self.at(time) else time

    def finished(self, time: float, takes: PromptSeconds) -> float:
        """When a prompt is computed whose first row begins at `time`."""
        left = 1.0
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
    """One rank from now (0.0) on, in seconds.

    `slots` and `kv` (in tokens) are free; `spare` tokens of KV have to stay free for each running request. `ends` is a
    heap of the running requests; `per_s` tells from their number how many tokens a second each of them gets. The
    waiting requests have `rows` prompt rows in all. All prompts that were added are computed at `clock`, which begins
    below 0.0 if the rank has been computing the first of them since then. `waiting` requests were added, `first` is the
    first of them, and `free` slots are free at 0.0.
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
        """Let a request wait behind the others; add to `decoding` when it decodes."""
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
        """How long a request waits that comes now."""
        if (passes_s := self._passes_s(prompt, decoding)) is not None:
            return ExpectedWait(passes_s, passes_s)
        newcomer = replace(self, ends=[*self.ends], rows=self.rows + prompt.rows)
        newcomer._begin(prompt)
        delay = max(0.0, newcomer.clock)
        step = self.speed.step_s(prompt.start, prompt.rows, decoding.at(delay))
        # It joins the next step, and on average half of the step under way is over.
        return ExpectedWait(max(newcomer._computed(prompt, decoding), step) + step / 2, delay)

    def _passes_s(self, prompt: QueuedPrompt, decoding: DecodeIntervals) -> float | None:
        """When a request that comes now gets its first token, if its prompt passes the first one; None if it does not.

        Beside decoding requests a step has a share of time for prompt rows. What the rows of the first prompt leave of
        it does not pay for one more of them. It may pay for rows of a later prompt, which are cheaper because fewer
        tokens precede them.
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
        """When a prompt is computed that begins at `clock`."""
        return decoding.finished(self.clock, self.speed.seconds(prompt.start, prompt.rows, self.rows))

    def _begin(self, prompt: QueuedPrompt) -> None:
        """Advance until there is a slot and KV for a request."""
        self._advance(self.clock)
        while self.ends and (self.slots < 1 or self.kv < prompt.tokens + self.spare * len(self.ends)):
            self.clock = max(self.clock, self.ends[0].ends)
            self._advance(self.ends[0].ends)

    def _advance(self, to: float) -> None:
        """Let running requests grow and end until `to`."""
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
    """The ranks of a gang, which take their steps together. Forecast at the time `made`, by the caller's clock."""

    def __init__(self, ranks: Sequence[RankForecast], queues: Sequence[Sequence[QueuedPrompt]], made: float) -> None:
        """`queues` are the waiting requests of each rank, in order."""
        self.ranks, self.made = ranks, made
        self._decoding = DecodeIntervals()
        self._decoding.add(
            min(0.0, *(rank.clock for rank in ranks)),
            max((end.ends for rank in ranks for end in rank.ends), default=0.0),
        )
        waiting = [deque(queue) for queue in queues]
        while left := [at for at, queue in enumerate(waiting) if queue]:
            first = min(left, key=lambda at: ranks[at].clock)
            ranks[first].add(waiting[first].popleft(), self._decoding)

    def add(self, rank: int, prompt: QueuedPrompt) -> None:
        """A request came to a rank, and waits behind the others."""
        self.ranks[rank].rows += prompt.rows
        self.ranks[rank].add(prompt, self._decoding)

    def wait(self, rank: int, prompt: QueuedPrompt, now: float) -> ExpectedWait:
        """The expected wait of a request that arrives at a rank at the time `now`."""
        found, age = self.ranks[rank].wait(prompt, self._decoding), now - self.made
        return ExpectedWait(max(0.0, found.seconds - age), max(0.0, found.delay - age))
