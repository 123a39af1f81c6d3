"""Measures the pace of this gang, the `StepTimes` that predict its step times: runs a few steps with made-up rows,
once, before the first request.

All ranks run the real step. The time of a step is that of the slowest rank, and the shortest of a few rounds: a machine
that is busy for a moment must not distort the pace for good.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from cluster.arch.resolve import ResolvedConfig
from cluster.batch import DecodeRequest, PromptChunk, RowSampling, StepInput
from cluster.engine.lockstep import Lockstep
from cluster.kv.cache import KVCache, Lease
from cluster.observability.step_times import Curve, StepTimes

MOST_ROWS = 4096  # most prompt rows of a measured step
ROUNDS, ENOUGH_S = 6, 3.0  # most rounds, and the seconds after which no further round begins
STRIDE = 7919  # between the token ids of neighbouring rows, so that not all rows choose the same experts
ROWS = 16  # the first point of the curve of prompt rows
MORE_DECODES, MORE_ROWS = 4, 2  # factors from one point of a curve to the next
STEEP = 2.0  # a curve ends at this multiple of the time of its first step, and is extrapolated from there
LONG = 2048  # prefix length for measuring attention, of decoding requests and of many prompt rows
DEEP = 8192  # prefix length for measuring a single row: no processor caches this much
SHALLOW = 128  # shorter prefixes are not measured: the time they add is below the noise of the clock


class TrialLoad(NamedTuple):
    """A step to be timed. In every group `decodes` requests decode, with `committed` tokens each. In addition the first
    group, or every group if `crowd`, runs `rows` prompt rows after a prefix of `start` tokens.
    """

    decodes: int
    committed: int = 0
    rows: int = 0
    start: int = 0
    crowd: bool = False


class StepLimits(NamedTuple):
    """The largest step that can be measured: its decoding requests, its prompt rows, the tokens of one request."""

    decodes: int
    rows: int
    tokens: int


def measure_pace(lockstep: Lockstep, cache: KVCache, resolved: ResolvedConfig) -> StepTimes:
    """Return the pace of this gang, the same on every rank. All ranks must call this, with an empty cache."""
    config, shape = resolved.settings, resolved.shape
    length = min(resolved.context_length, cache.total * cache.page_size - shape.window)
    most_rows = max(1, min(resolved.chunk_rows, MOST_ROWS, length // 2))
    limits = StepLimits(config.max_running_requests, most_rows, length)
    length = min(length, DEEP + limits.rows)
    tokens = tuple(STRIDE * index % resolved.target.vocab_size for index in range(length + 1))
    trial = _Trial(lockstep, resolved, tokens)
    if lockstep.mesh.leads:
        lease = cache.open(tokens, length + shape.window)
        assert lease is not None, "an empty cache holds a request"
        trial.begin(cache, lease)
    trial.run(TrialLoad(1, rows=1))  # warm-up: the first step initialises libraries and buffers
    given = (limits, config.prefill_share, shape.num_draft_tokens, lockstep.mesh.attn_dp)
    pace = fit(trial.time, *given)
    for _ in range(ROUNDS - 1):
        if trial.spent < ENOUGH_S:
            trial.again()
            pace = fit(trial.time, *given)
    if trial.lease is not None:
        cache.close(trial.lease, tokens, 0)
    lockstep.mesh.world.clock.split()  # drop the waits of these steps from the statistics
    return pace


@dataclass(slots=True)
class _Trial:
    """Runs steps with made-up rows and keeps the best time of each. In each group all rows belong to one request. It
    appears several times in a step with several decoding requests.
    """

    lockstep: Lockstep
    resolved: ResolvedConfig
    tokens: tuple[int, ...]
    lease: Lease | None = None
    spent: float = 0.0
    best: dict[TrialLoad, float] = field(default_factory=dict)
    _first: StepInput = field(default=StepInput())

    def begin(self, cache: KVCache, lease: Lease) -> None:
        """Use `lease`. The first step input brings its table row to the device and to followers."""
        self.lease = lease
        greedy = RowSampling(lease.row, 0.0, 0, 1.0, 0.0, 0)
        self._first = StepInput(samplings=(greedy,), writes=cache.table.unsent)
        cache.table.sent()

    def time(self, load: TrialLoad) -> float:
        """Return the best time so far of a step with this load, in microseconds; the same on every rank."""
        if load not in self.best:
            self.best[load] = self._everyones(self.run(load))
        return self.best[load]

    def again(self) -> None:
        """Run one more round of all loads timed so far."""
        for load, best in self.best.items():
            self.best[load] = min(best, self._everyones(self.run(load)))

    def _everyones(self, seconds: float) -> float:
        """Return the time of the slowest rank in microseconds, at least 1; adds it to `spent`."""
        slowest = max(us for (us,) in self.lockstep.mesh.all_gather_row((int(1e6 * seconds),)))
        self.spent += slowest / 1e6
        return max(1.0, slowest)

    def run(self, load: TrialLoad) -> float:
        """Run a step with this load; returns the seconds that it took on this rank."""
        order = StepInput()
        if self.lease is not None:
            order, self._first = self._first, StepInput()
            at = (self.lease.row, load.committed)
            order = order._replace(decodes=(DecodeRequest(*at, load.committed),) * load.decodes, lens=(at,))
            if load.rows and (load.crowd or self.lockstep.mesh.dp_rank == 0):
                stop = load.start + load.rows
                chunk = PromptChunk(self.lease.row, load.start, stop, False, self.tokens[load.start : stop + 1])
                order = order._replace(chunks=(chunk,))
        began = time.perf_counter()
        ran = self.lockstep.run(order, int(self.lease is not None), self.resolved.levels_at(load.decodes))
        if ran.output is not None:
            self.lockstep.read(ran)
        return time.perf_counter() - began


def fit(time: Callable[[TrialLoad], float], limits: StepLimits, share: float, tree: int, groups: int) -> StepTimes:
    """Return the pace of a gang of `groups`, fitted to a few steps; `time` measures a step, in microseconds."""
    # Curve 1: time by decoding requests. The number grows by factors until the step takes twice as long.
    alone = time(TrialLoad(1))
    decode = [(1, alone)]
    while decode[-1][0] < limits.decodes and decode[-1][1] < STEEP * alone:
        more = min(decode[-1][0] * MORE_DECODES, limits.decodes)
        decode.append((more, time(TrialLoad(more))))
    # Curve 2: time by target rows, of one decoding request (`tree` rows) and a growing prompt chunk.
    few = min(ROWS, limits.rows)
    target = [(tree, alone), (tree + few, time(TrialLoad(1, rows=few)))]
    rows = few
    while rows < limits.rows and (target[-1][1] < STEEP * alone or len(target) == 2):
        rows = min(rows * MORE_ROWS, limits.rows)
        target.append((tree + rows, time(TrialLoad(1, rows=rows))))
    last = target[-1][1]

    # If all groups run the rows, the step takes longer by `crowd` times the rows' own time for each other group.
    crowd = 0.0
    if groups > 1 and last > alone:
        together = time(TrialLoad(1, rows=rows, crowd=True))
        crowd = min(1.0, max(0.0, (together - last) / (last - alone) / (groups - 1)))
    long, deep = min(LONG, limits.tokens - rows), min(DEEP, limits.tokens - rows)
    token = prefix = pair = 0.0
    if deep >= SHALLOW:
        # `token`: per request and token of its length. `prefix` and `pair`: a chunk of n rows after p tokens costs
        # p * (prefix + pair * n). One row and `rows` rows give two equations for the two unknowns.
        readers, usual = decode[min(1, len(decode) - 1)]
        token = max(0.0, time(TrialLoad(readers, long)) - usual) / (readers * long)
        more_one = max(0.0, time(TrialLoad(1, rows=1, start=deep)) - time(TrialLoad(1, rows=1))) / deep
        more_rows = max(more_one, (time(TrialLoad(1, rows=rows, start=long)) - last) / long)
        pair = (more_rows - more_one) / (rows - 1) if rows > 1 else more_one
        prefix = max(0.0, more_one - pair)
    return StepTimes(share, tree, _rising(decode), token, _rising(target), prefix, pair, crowd, groups)


def _rising(points: Sequence[tuple[int, float]]) -> Curve:
    """Return the points with each time raised to the time before if it is lower: less work never takes longer."""
    times = accumulate((us for _, us in points), max)
    return tuple((at, us) for (at, _), us in zip(points, times, strict=True))
