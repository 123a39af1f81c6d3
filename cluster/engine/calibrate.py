"""Measures the pace of this gang, the `StepTimes` that predict its step times: runs a few steps with made-up rows,
once, before the first request.

All ranks run real steps. Each step is run several times, once in each round. The time of a step in a round is that of
the slowest rank. The shortest of these times counts, because a machine that is busy for a moment must not distort the
pace for good.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from cluster.arch.resolve import ResolvedConfig
from cluster.batch import DecodeRequest, ExtendMode, PromptChunk, RowSampling, StepInput
from cluster.dp_attention.facts import TreeVote
from cluster.engine.lockstep import Lockstep
from cluster.kv.cache import KVCache, Lease
from cluster.observability.step_times import Curve, StepTimes

MAX_MEASURED_ROWS = 4096  # most prompt rows of a measured step
MAX_ROUNDS, MAX_SECONDS = 6, 3.0  # most rounds, and the seconds after which no further round begins
TOKEN_STRIDE = 7919  # between the token ids of neighbouring rows, so that not all rows choose the same experts
FIRST_ROWS = 16  # the first point of the curve of prompt rows
DECODES_FACTOR, ROWS_FACTOR = 4, 2  # factors from one point of a curve to the next
MAX_SLOWDOWN = 2.0  # a curve ends at this multiple of the time of its first step, and is extrapolated from there
LONG_PREFIX = 2048  # prefix length for measuring attention, of decoding requests and of many prompt rows
DEEP_PREFIX = 8192  # prefix length for measuring a single row: the KV is larger than any processor's cache
MIN_PREFIX = 128  # shorter prefixes are not measured: the time they add is below the noise of the clock


class TrialLoad(NamedTuple):
    """A step to be timed. In every attention group `decodes` requests decode, with `committed` tokens each. In addition
    the first group, or every group if `all_groups`, runs `rows` prompt rows after a prefix of `start` tokens. `tier` is
    the number of the trees' shape. If it is None, the trees are the largest without looked-up tokens that the settings
    allow for `decodes` requests. If `distinct`, each request has pages of its own, as far as `trial_steps` has opened
    any; otherwise all requests of a group are the same one.
    """

    decodes: int
    committed: int = 0
    rows: int = 0
    start: int = 0
    all_groups: bool = False
    tier: int | None = None
    distinct: bool = False


class StepLimits(NamedTuple):
    """The largest step that can be measured: its decoding requests, its prompt rows, the tokens of one request."""

    decodes: int
    rows: int
    tokens: int


def measure_pace(lockstep: Lockstep, cache: KVCache, resolved: ResolvedConfig) -> StepTimes:
    """Return the pace of this gang, the same on every rank. All ranks must call this, with an empty cache."""
    config, max_length = resolved.settings, max_trial_tokens(cache, resolved)
    max_rows = max(1, min(resolved.chunk_rows, MAX_MEASURED_ROWS, max_length // 2))
    limits = StepLimits(config.max_running_requests, max_rows, max_length)
    nodes = resolved.shape.drafted_shape.num_draft_tokens
    fit_arguments = (limits, config.prefill_share, nodes, lockstep.mesh.attn_dp)
    with trial_steps(lockstep, cache, resolved, min(max_length, DEEP_PREFIX + limits.rows)) as trial:
        trial.run(TrialLoad(1, rows=1))  # warm-up: the first step initialises libraries and buffers
        pace = fit(trial.time, *fit_arguments)
        for _ in range(MAX_ROUNDS - 1):
            if trial.spent_s < MAX_SECONDS:
                trial.repeat()
                pace = fit(trial.time, *fit_arguments)
    return pace


def max_trial_tokens(cache: KVCache, resolved: ResolvedConfig) -> int:
    """Return the most tokens that the request of a trial may have."""
    return min(resolved.context_length, cache.total_pages * cache.page_size - resolved.shape.window)


@contextmanager
def trial_steps(
    lockstep: Lockstep, cache: KVCache, resolved: ResolvedConfig, length: int, requests: int = 1, context: int = 0
) -> Iterator["Trial"]:
    """Yield a `Trial` with a request that has room for `length` tokens. With it are as many others with room for
    `context` tokens as the cache holds, up to `requests` in all. All ranks must call this, with an empty cache.
    """
    tokens = tuple(TOKEN_STRIDE * index % resolved.target.vocab_size for index in range(length + 1))
    trial, window = Trial(lockstep, resolved, tokens), resolved.shape.window
    if requests > 1:
        # On a CPU, memory that was never written is one page of zeros, which is always in the processor's caches.
        pages = cache.pages_for(length + window) + (requests - 1) * cache.pages_for(context + window)
        lockstep.step.write_zeros((min(pages, cache.total_pages) + 1) * cache.page_size)
    if lockstep.mesh.is_leader:
        lease = cache.open(tokens, length + window, most_tokens=length + window)
        assert lease is not None, "an empty cache holds a request"
        leases = [lease]
        most = context + window
        while len(leases) < requests and (lease := cache.open(tokens, most, max_cached_tokens=0, most_tokens=most)):
            leases.append(lease)
        if cache.window is not None:
            for lease in leases:
                cache.window.lend(lease.own_pages)
        trial.begin(cache, leases)
    yield trial
    for lease in trial.leases:
        if cache.window is not None:
            cache.window.take_back(lease.own_pages)
        cache.close(lease, tokens, 0)
    lockstep.mesh.world.clock.take_collective_spans()  # drop the waits of these steps from the statistics
    lockstep.step.forget_chances()  # the accepted nodes mean nothing, because the tokens were made up


@dataclass(slots=True)
class Trial:
    """Runs steps with made-up rows and keeps the shortest time of each load in `best_us`. In each group all rows belong
    to the first request of `leases`, which then appears several times in a step with several decoding requests. With
    `TrialLoad.distinct`, the decoding requests are those of all leases in turn.

    A draft may rest, that is, not read the tokens of steps without trees. The step in which it wakes reads the last of
    these tokens. `waking_us` has the shortest times of such steps, by number of decoding requests.
    """

    lockstep: Lockstep
    resolved: ResolvedConfig
    tokens: tuple[int, ...]
    leases: Sequence[Lease] = ()
    spent_s: float = 0.0
    best_us: dict[TrialLoad, float] = field(default_factory=dict)
    waking_us: dict[int, float] = field(default_factory=dict)
    _first_step_input: StepInput = field(default=StepInput())

    def begin(self, cache: KVCache, leases: Sequence[Lease]) -> None:
        """Use the pages of `leases` in all later steps. The first step input sends the page table rows of these leases
        to the device and to the followers.
        """
        self.leases = leases
        greedy = tuple(RowSampling(lease.row, 0.0, 0, 1.0, 0.0, 0) for lease in leases)
        table = cache.table
        self._first_step_input = StepInput(
            samplings=greedy, writes=table.unsent_writes, window_writes=table.unsent_window_writes
        )
        table.mark_sent()

    def time(self, load: TrialLoad) -> float:
        """Return the best time so far of a step with this load, in microseconds; the same on every rank."""
        if load not in self.best_us:
            self.best_us[load] = self.time_once(load)
        return self.best_us[load]

    def time_once(self, load: TrialLoad) -> float:
        """Run a step with this load. Return its time in microseconds, the same on every rank."""
        return self._slowest_rank_us(self.run(load))

    def repeat(self) -> None:
        """Run one more round of all loads timed so far."""
        for load in self.best_us:
            self.best_us[load] = min(self.best_us[load], self.time_once(load))

    def _slowest_rank_us(self, seconds: float) -> float:
        """Return the time of the slowest rank in microseconds, at least 1. Add this time to `spent_s`."""
        slowest = max(rank_us for (rank_us,) in self.lockstep.mesh.all_gather_row((int(1e6 * seconds),)))
        self.spent_s += slowest / 1e6
        return max(1.0, slowest)

    def run(self, load: TrialLoad) -> float:
        """Run a step with this load, and return the seconds that it took on this rank. If the draft rested before, it
        first wakes in a step of its own, whose time goes to `waking_us`.
        """
        seconds, extend_mode = self._run_step(load)
        if extend_mode is ExtendMode.MISSED:
            waking_us = self._slowest_rank_us(seconds)
            self.waking_us[load.decodes] = min(waking_us, self.waking_us.get(load.decodes, waking_us))
            seconds, _ = self._run_step(load)
        return seconds

    def _run_step(self, load: TrialLoad) -> tuple[float, ExtendMode]:
        """Run a step; return the seconds that it took on this rank, and which rows its draft read."""
        step_input = StepInput()
        if self.leases:
            step_input, self._first_step_input = self._first_step_input, StepInput()
            leases = self.leases[: load.decodes] if load.distinct else self.leases[:1]
            rows, committed = [lease.row for lease in leases], load.committed
            step_input = step_input._replace(
                decodes=tuple(DecodeRequest(rows[i % len(rows)], committed, committed) for i in range(load.decodes)),
                lens=tuple((row, committed) for row in rows),
            )
            if load.rows and (load.all_groups or self.lockstep.mesh.dp_rank == 0):
                stop = load.start + load.rows
                chunk = PromptChunk(self.leases[0].row, load.start, stop, False, self.tokens[load.start : stop + 1])
                step_input = step_input._replace(chunks=(chunk,))
        started = time.perf_counter()
        largest = min(self.resolved.max_tier(load.decodes), self.resolved.last_drafted_tier)
        vote = TreeVote(largest if load.tier is None else load.tier)
        step = self.lockstep.run(step_input, int(bool(self.leases)), vote)
        if step.output is not None:
            self.lockstep.read(step)
        return time.perf_counter() - started, step.plan.extend_mode


def fit(time: Callable[[TrialLoad], float], limits: StepLimits, share: float, tree: int, groups: int) -> StepTimes:
    """Return the pace of a gang of `groups` attention groups, fitted to a few steps. `time` measures a step and returns
    microseconds. `share` and `tree` are as in `StepTimes`.
    """
    # Curve 1: time by decoding requests. The number grows by factors until the step takes twice as long.
    single_us = time(TrialLoad(1))
    decode = [(1, single_us)]
    while decode[-1][0] < limits.decodes and decode[-1][1] < MAX_SLOWDOWN * single_us:
        next_count = min(decode[-1][0] * DECODES_FACTOR, limits.decodes)
        decode.append((next_count, time(TrialLoad(next_count))))
    # Curve 2: time by target rows, of one decoding request (`tree` rows) and a growing prompt chunk.
    few_rows = min(FIRST_ROWS, limits.rows)
    target = [(tree, single_us), (tree + few_rows, time(TrialLoad(1, rows=few_rows)))]
    rows = few_rows
    while rows < limits.rows and (target[-1][1] < MAX_SLOWDOWN * single_us or len(target) == 2):
        rows = min(rows * ROWS_FACTOR, limits.rows)
        target.append((tree + rows, time(TrialLoad(1, rows=rows))))
    max_rows_us = target[-1][1]

    # If all groups run the rows, the step takes longer by `group_factor` times the rows' own time for each other group.
    group_factor = 0.0
    if groups > 1 and max_rows_us > single_us:
        all_groups_us = time(TrialLoad(1, rows=rows, all_groups=True))
        group_factor = min(1.0, max(0.0, (all_groups_us - max_rows_us) / (max_rows_us - single_us) / (groups - 1)))
    long_prefix, deep_prefix = min(LONG_PREFIX, limits.tokens - rows), min(DEEP_PREFIX, limits.tokens - rows)
    token_us = prefix_us = pair_us = 0.0
    if deep_prefix >= MIN_PREFIX:
        # `token_us`: per request and token of its length. `prefix_us` and `pair_us`: a chunk of n rows after p tokens
        # costs p * (prefix_us + pair_us * n). One row and `rows` rows give two equations for the two unknowns.
        decode_count, decode_us = decode[min(1, len(decode) - 1)]
        token_us = max(0.0, time(TrialLoad(decode_count, long_prefix)) - decode_us) / (decode_count * long_prefix)
        one_row_us = max(0.0, time(TrialLoad(1, rows=1, start=deep_prefix)) - time(TrialLoad(1, rows=1))) / deep_prefix
        per_token_us = max(one_row_us, (time(TrialLoad(1, rows=rows, start=long_prefix)) - max_rows_us) / long_prefix)
        pair_us = (per_token_us - one_row_us) / (rows - 1) if rows > 1 else one_row_us
        prefix_us = max(0.0, one_row_us - pair_us)
    return StepTimes(
        share,
        tree,
        _non_decreasing(decode),
        token_us,
        _non_decreasing(target),
        prefix_us,
        pair_us,
        group_factor,
        groups,
    )


def _non_decreasing(points: Sequence[tuple[int, float]]) -> Curve:
    """Return the points with times that never decrease, because less work never takes longer. A time below the previous
    one is replaced by the previous one.
    """
    times = accumulate((us for _, us in points), max)
    return tuple((count, us) for (count, _), us in zip(points, times, strict=True))
