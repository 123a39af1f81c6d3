"""Measures how long steps of this gang take: a few with made-up rows, once at start, before the first request.

They run the real step, on every rank at once. A time is the slowest rank's, and the best of a few rounds, so that a
machine which is busy for a moment does not distort the pace for good.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from cluster.batch import DecodeRequest, PromptChunk, RowSampling, StepInput
from cluster.config import EngineConfig
from cluster.engine.lockstep import Lockstep
from cluster.kv.cache import KVCache, Lease
from cluster.observability.step_times import Curve, StepTimes

MOST_ROWS = 4096  # no measured step has more prompt rows
ROUNDS, ENOUGH_S = 6, 3.0  # at most so many rounds, and no further one after so many seconds
STRIDE = 7919  # between token ids, so that not all rows choose the same experts
ROWS = 16  # the first point of the curve of prompt rows
MORE_DECODES, MORE_ROWS = 4, 2  # factors from one point of a curve to the next
STEEP = 2.0  # a curve ends at so many times the time of its first step; beyond that it is extrapolated
LONG = 2048  # length with which attention's own work is measured, of decoding requests and of many prompt rows
DEEP = 8192  # length of the prefix with which reading it is measured, by a single row: no processor caches so much
SHALLOW = 128  # shorter prefixes are not measured: what they add is less than the clock's noise


class TrialLoad(NamedTuple):
    """A step to be timed. In every group `decodes` requests decode, with `committed` tokens each; besides, one group,
    or every group if `crowd`, runs `rows` prompt rows that follow `start` tokens.
    """

    decodes: int
    committed: int = 0
    rows: int = 0
    start: int = 0
    crowd: bool = False


class StepLimits(NamedTuple):
    """The largest step that can be measured: decoding requests, prompt rows, and tokens of one request."""

    decodes: int
    rows: int
    tokens: int


def measure_pace(lockstep: Lockstep, cache: KVCache, config: EngineConfig, context: int, vocab_size: int) -> StepTimes:
    """The pace of this gang, the same on every rank; all ranks must call this, with an empty cache."""
    shape = lockstep.shapes[-1]
    length = min(context, cache.total * cache.page_size - shape.window)
    budget = config.chunked_prefill_size if config.chunked_prefill_size > 0 else MOST_ROWS
    limits = StepLimits(config.max_running_requests, max(1, min(budget, MOST_ROWS, length // 2)), length)
    length = min(length, DEEP + limits.rows)
    tokens = tuple(STRIDE * index % vocab_size for index in range(length + 1))
    trial = _Trial(lockstep, config, tokens)
    if lockstep.mesh.leads:
        lease = cache.open(tokens, length + shape.window)
        assert lease is not None, "an empty cache holds a request"
        trial.begin(cache, lease)
    trial.run(TrialLoad(1, rows=1))  # warm-up: what is initialised on first use
    given = (limits, config.prefill_share, shape.num_draft_tokens, lockstep.mesh.attn_dp)
    pace = fit(trial.time, *given)
    for _ in range(ROUNDS - 1):
        if trial.spent < ENOUGH_S:
            trial.again()
            pace = fit(trial.time, *given)
    if trial.lease is not None:
        cache.close(trial.lease, tokens, 0)
    lockstep.mesh.world.clock.split()
    return pace


@dataclass(slots=True)
class _Trial:
    """Steps with made-up rows, and the best time of each. In each group all rows belong to one request, which is
    repeated as often as a step needs.
    """

    lockstep: Lockstep
    config: EngineConfig
    tokens: tuple[int, ...]
    lease: Lease | None = None
    spent: float = 0.0
    best: dict[TrialLoad, float] = field(default_factory=dict)
    _first: StepInput = field(default=StepInput())

    def begin(self, cache: KVCache, lease: Lease) -> None:
        """Use `lease`; the first order tells followers of it."""
        self.lease = lease
        greedy = RowSampling(lease.row, 0.0, 0, 1.0, 0.0, 0)
        self._first = StepInput(samplings=(greedy,), writes=cache.table.unsent)
        cache.table.sent()

    def time(self, load: TrialLoad) -> float:
        """The best time so far of a step with this load, in microseconds, the same on every rank."""
        if load not in self.best:
            self.best[load] = self._everyones(self.run(load))
        return self.best[load]

    def again(self) -> None:
        """Another round of steps with all loads that were timed."""
        for load, best in self.best.items():
            self.best[load] = min(best, self._everyones(self.run(load)))

    def _everyones(self, seconds: float) -> float:
        """The slowest rank's time in microseconds, added to `spent`."""
        slowest = max(us for (us,) in self.lockstep.mesh.all_gather_row((int(1e6 * seconds),)))
        self.spent += slowest / 1e6
        return max(1.0, slowest)

    def run(self, load: TrialLoad) -> float:
        """Run a step with this load; returns its seconds on this rank."""
        order, deepest = StepInput(), len(self.lockstep.shapes) - 1
        if self.lease is not None:
            order, self._first = self._first, StepInput()
            at = (self.lease.row, load.committed)
            order = order._replace(decodes=(DecodeRequest(*at, load.committed),) * load.decodes, lens=(at,))
            if load.rows and (load.crowd or self.lockstep.mesh.dp_rank == 0):
                stop = load.start + load.rows
                chunk = PromptChunk(self.lease.row, load.start, stop, False, self.tokens[load.start : stop + 1])
                order = order._replace(chunks=(chunk,))
        began = time.perf_counter()
        ran = self.lockstep.run(order, int(self.lease is not None), self.config.levels_at(load.decodes, deepest))
        if ran.output is not None:
            self.lockstep.read(ran)
        return time.perf_counter() - began


def fit(time: Callable[[TrialLoad], float], limits: StepLimits, share: float, tree: int, groups: int) -> StepTimes:
    """The pace of a gang of `groups`, fitted to a few steps; `time` measures a step, in microseconds."""
    alone = time(TrialLoad(1))
    decode = [(1, alone)]
    while decode[-1][0] < limits.decodes and decode[-1][1] < STEEP * alone:
        more = min(decode[-1][0] * MORE_DECODES, limits.decodes)
        decode.append((more, time(TrialLoad(more))))
    few = min(ROWS, limits.rows)
    target = [(tree, alone), (tree + few, time(TrialLoad(1, rows=few)))]
    rows = few
    while rows < limits.rows and (target[-1][1] < STEEP * alone or len(target) == 2):
        rows = min(rows * MORE_ROWS, limits.rows)
        target.append((tree + rows, time(TrialLoad(1, rows=rows))))
    last = target[-1][1]

    crowd = 0.0
    if groups > 1 and last > alone:
        together = time(TrialLoad(1, rows=rows, crowd=True))
        crowd = min(1.0, max(0.0, (together - last) / (last - alone) / (groups - 1)))
    long, deep = min(LONG, limits.tokens - rows), min(DEEP, limits.tokens - rows)
    token = prefix = pair = 0.0
    if deep >= SHALLOW:
        readers, usual = decode[min(1, len(decode) - 1)]
        token = max(0.0, time(TrialLoad(readers, long)) - usual) / (readers * long)
        more_one = max(0.0, time(TrialLoad(1, rows=1, start=deep)) - time(TrialLoad(1, rows=1))) / deep
        more_rows = max(more_one, (time(TrialLoad(1, rows=rows, start=long)) - last) / long)
        pair = (more_rows - more_one) / (rows - 1) if rows > 1 else more_one
        prefix = max(0.0, more_one - pair)
    return StepTimes(share, tree, _rising(decode), token, _rising(target), prefix, pair, crowd, groups)


def _rising(points: Sequence[tuple[int, float]]) -> Curve:
    """The same points, none below the one before: less work never takes longer."""
    times = accumulate((us for _, us in points), max)
    return tuple((at, us) for (at, _), us in zip(points, times, strict=True))
