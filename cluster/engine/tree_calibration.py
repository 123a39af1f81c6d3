"""Measures what each tree costs on this gang, before the first request: the `TreeCosts` by which steps choose trees."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from cluster.arch.resolve import ResolvedConfig
from cluster.config.tree_shape import TreeShape
from cluster.dp_attention.tree_times import TreeCosts
from cluster.engine.calibrate import DECODES_FACTOR, Trial, TrialLoad, max_trial_tokens, trial_steps
from cluster.engine.lockstep import Lockstep
from cluster.engine.tree_extrapolation import all_times
from cluster.kv.cache import KVCache
from cluster.status import TreeCost

MAX_CONTEXT = 128
"""The committed tokens of each request in a measured step. Requests have fewer tokens while they are short, and more
later. From this number, the ratio of two trees' times can be told best in both directions (docs/log.md).
"""
LONG_CONTEXT, MAX_LONG_SECONDS = 2048, 0.15
"""To learn what a committed token costs, steps are also measured with requests of `LONG_CONTEXT` tokens. The number of
requests is the largest whose steps of all tiers, with short contexts, take less than `MAX_LONG_SECONDS` in all. If
there is none, this is not measured.
"""
LINEAR_GROWTH = 0.7
"""Each number of requests is `DECODES_FACTOR` times the number before. If the step time grows by `LINEAR_GROWTH` times
this factor or more, then only a few trees are measured with larger numbers of requests.
"""
MAX_TREE_SECONDS = 3.0
"""After this many seconds, only a few trees are measured with further numbers of requests."""
SECOND_COUNT_SECONDS = 8.0
"""All trees are measured with the second number of requests up to this many seconds: with one number, nothing can be
extrapolated.
"""
BETWEEN_FACTOR = 2
"""Between two numbers of requests that were measured, a few trees are measured with a third number: the smaller of the
two, times `BETWEEN_FACTOR`.
"""
MAX_FEW_TREES_SECONDS = 6.0
"""The measurements of a few trees may take this many seconds in all. Before each number of requests the time of its
measurement is predicted. If the limit would be exceeded, this number is not measured.
"""
MIN_ROUNDS, MAX_ROUNDS, MAX_ROUND_SECONDS = 3, 8, 0.2
"""The steps of one number of requests are measured in rounds: at least `MIN_ROUNDS` and at most `MAX_ROUNDS`, and no
further one after `MAX_ROUND_SECONDS`. Rounds before these run the steps that were not captured at start: eagerly, then
captured.
"""


def measure_trees(lockstep: Lockstep, cache: KVCache, resolved: ResolvedConfig) -> TreeCosts:
    """Return the costs of all tiers, the same on every rank. All ranks must call this, with an empty cache.

    A tier is the number of a tree shape that steps may use. The largest tree of every depth, all trees of the largest
    depth and all trees with looked-up tokens are measured. The times of the other trees follow from these
    (`completed`). The time of a step is that of the slowest rank, at the pace of the fastest round (`typical_times`).

    The numbers of decoding requests grow from 1 to the most that may run. With larger numbers, a step takes long, and
    its time can be computed from those of other steps (`all_times`). So after `MAX_TREE_SECONDS`, or once the time of
    the largest tree grows nearly as fast as the number of requests, only a few trees are measured. A few trees are also
    measured with numbers that lie between these: the time of a step does not grow evenly with its rows.
    """
    max_decodes, max_context = resolved.settings.max_running_requests, max_trial_tokens(cache, resolved)
    context, long_context = min(MAX_CONTEXT, max_context // 2), min(LONG_CONTEXT, max_context)
    with trial_steps(lockstep, cache, resolved, long_context, max_decodes, context) as trial:
        measurement = _Measurement(trial, resolved, context, 2 * lockstep.programs.assembler.buffer_sets)
        measurement.measure_all_trees()
        affordable = [n for n, us in measurement.us.items() if sum(us.values()) < 1e6 * MAX_LONG_SECONDS]
        measurement.measure_few_trees()
        token_ns = tuple[int, ...]()
        if affordable and long_context > context:  # the programs of these steps are captured by now
            token_ns = tuple(measurement.token_ns(affordable[-1], long_context))
        counts = list(measurement.us)
        waking = list(accumulate((round(trial.waking_us[count]) for count in counts if trial.waking_us), max))
    if len(counts) > 1 and counts[-1] < max_decodes:
        if waking:  # a line through the last two
            grown = (waking[-1] - waking[-2]) * (max_decodes - counts[-1]) // (counts[-1] - counts[-2])
            waking.append(waking[-1] + grown)
        counts.append(max_decodes)
    # More requests never take less time; a measured time below that of fewer requests is noise.
    us = tuple(tuple(accumulate(times, max)) for times in zip(*map(measurement.all_us, counts), strict=True))
    return TreeCosts(tuple(counts), us, tuple(waking), context, token_ns)


class _Measurement:
    """The times of trees with various numbers of requests, of `context` committed tokens each. Before each measurement,
    `warm_up_rounds` rounds run that do not count. `us` has the measured times in microseconds by tier, by number of
    requests; the numbers ascend.
    """

    def __init__(self, trial: Trial, resolved: ResolvedConfig, context: int, warm_up_rounds: int) -> None:
        self._trial, self._context, self._warm_up_rounds = trial, context, warm_up_rounds
        self._max_decodes, self._tiers = resolved.settings.max_running_requests, resolved.tiers
        deepest, last = _deepest(self._tiers), resolved.last_drafted_tier
        self._measured = [
            t for t, s in enumerate(self._tiers) if s in deepest or not s.selects_nodes or s.lookup_tokens
        ]
        # The tiers that `measure_few_trees` measures: with many requests, small trees are the ones to choose from.
        largest = last or len(self._tiers) - 1
        self._few = sorted({0, min(1, largest), (largest + 1) // 2})
        self.us = dict[int, dict[int, int]]()

    def measure_all_trees(self) -> None:
        """Measure steps of 1, 4, 16, ... requests with all trees, as far as `measure_trees` says."""
        while count := self._next_count:
            if self._trial.spent_s > (MAX_TREE_SECONDS if len(self.us) > 1 else SECOND_COUNT_SECONDS):
                break
            last_two = [times[len(self._tiers) - 1] for times in self.us.values()][-2:]
            if len(last_two) > 1 and last_two[1] > LINEAR_GROWTH * DECODES_FACTOR * last_two[0]:
                break
            loads = [TrialLoad(count, self._context, tier=tier, distinct=True) for tier in self._measured]
            times = _times(self._trial, loads, self._warm_up_rounds)
            self.us[count] = dict(enumerate(completed(dict(zip(self._measured, times, strict=True)), self._tiers)))

    def measure_few_trees(self) -> None:
        """Measure steps of further numbers of requests with a few trees: of larger numbers, then of those between the
        measured ones, the largest first. Stop before they take more than `MAX_FEW_TREES_SECONDS` in all.
        """
        limit_s = self._trial.spent_s + MAX_FEW_TREES_SECONDS
        while len(self.us) > 1 and (count := self._next_count) and self._measure_few(count, limit_s):
            pass
        counts = list(self.us)
        for low, high in reversed(list(pairwise(counts))):
            if low * BETWEEN_FACTOR < high:
                self._measure_few(low * BETWEEN_FACTOR, limit_s)
        self.us = dict(sorted(self.us.items()))

    def _measure_few(self, count: int, limit_s: float) -> bool:
        """Measure steps of `count` requests with a few trees, if this is expected to end before the trial has spent
        `limit_s` seconds. Return whether they were measured.
        """
        expected_us = self.all_us(count)
        round_s = sum(expected_us[tier] for tier in self._few) / 1e6
        if self._trial.spent_s + (self._warm_up_rounds + MIN_ROUNDS) * round_s > limit_s:
            return False
        loads = [TrialLoad(count, self._context, tier=tier, distinct=True) for tier in self._few]
        self.us[count] = dict(zip(self._few, _times(self._trial, loads, self._warm_up_rounds), strict=True))
        return True

    def token_ns(self, count: int, long_context: int) -> list[int]:
        """Return by tier the nanoseconds that a committed token of a request adds to a step. Steps of `count` requests
        are measured, also with `long_context` tokens each.
        """
        lengths = self._context, long_context
        loads = [TrialLoad(count, length, tier=tier) for length in lengths for tier in self._measured]
        times = _times(self._trial, loads)
        short_us, long_us = times[: len(self._measured)], times[len(self._measured) :]
        more_tokens = count * (long_context - self._context)
        added_ns = [max(0, 1000 * (long - short) // more_tokens) for short, long in zip(short_us, long_us, strict=True)]
        return completed(dict(zip(self._measured, added_ns, strict=True)), self._tiers)

    def all_us(self, count: int) -> list[int]:
        """Return the times of all trees with `count` requests: measured, or else computed from those that were."""
        measured_us = self.us.get(count, {})
        if len(measured_us) == len(self._tiers):
            return list(measured_us.values())
        return all_times(sorted(self.us.items()), self._tiers, count)

    @property
    def _next_count(self) -> int:
        """The number of requests of the next measurement. It is 0 after steps with `max_running_requests` requests were
        measured.
        """
        last = max(self.us, default=0)
        return 0 if last == self._max_decodes else min(self._max_decodes, DECODES_FACTOR * last or 1)


def tree_costs(costs: TreeCosts, resolved: ResolvedConfig) -> tuple[TreeCost, ...]:
    """Return the costs in the form that a rank reports, with one entry for each tree of `resolved.tiers`."""

    def by_count(times_us: Sequence[int]) -> dict[str, float]:
        return {str(count): us / 1000 for count, us in zip(costs.counts, times_us, strict=bool(times_us))}

    return tuple(
        TreeCost(
            num_steps=shape.drafted_shape.num_steps,
            num_draft_tokens=shape.num_draft_tokens,
            lookup_tokens=shape.lookup_tokens,
            ms=by_count(times_us),
            waking_ms={} if shape.num_steps else by_count(costs.wake_us),
        )
        for shape, times_us in zip(resolved.tiers, costs.us, strict=True)
    )


def completed(measured_us: Mapping[int, int], shapes: Sequence[TreeShape]) -> list[int]:
    """Return the times of all trees, given those of some of them; see `measure_trees`. `shapes` are all trees, and the
    keys of `measured_us` are indices of `shapes`.

    This assumes that a row of the target takes the same time in all trees. So the time of a tree that was not measured
    is that of the largest tree with the same levels, less the time of the missing rows. Trees of the largest depth show
    how much time these rows take.
    """
    deepest = _deepest(shapes)
    points = sorted((s.num_draft_tokens, measured_us[t]) for t, s in enumerate(shapes) if s in deepest)

    def target_us(nodes: int) -> float:
        """Return the time of a tree of the largest depth with this number of nodes: linear between the measured
        numbers, and extrapolated beyond them.
        """
        if len(points) == 1:
            return points[0][1]
        right = next((i for i, (count, _) in enumerate(points) if i and count >= nodes), len(points) - 1)
        (low, low_us), (high, high_us) = points[right - 1], points[right]
        return low_us + (high_us - low_us) * (nodes - low) / (high - low)

    def time_us(tier: int, shape: TreeShape) -> int:
        if tier in measured_us:
            return measured_us[tier]
        largest_us = max(us for t, us in measured_us.items() if _levels(shapes[t]) == _levels(shape))
        saved_us = target_us(shape.max_nodes) - target_us(shape.num_draft_tokens)
        return max(measured_us[0], round(largest_us - max(0.0, saved_us)))

    return _without_noise([time_us(tier, shape) for tier, shape in enumerate(shapes)], shapes)


def _deepest(shapes: Sequence[TreeShape]) -> list[TreeShape]:
    """Return the shapes with the most levels among those without looked-up tokens."""
    drafted = [shape for shape in shapes if not shape.lookup_tokens]
    return [shape for shape in drafted if shape.num_steps == drafted[-1].num_steps]


def _levels(shape: TreeShape) -> tuple[int, int]:
    """Return how many levels the draft computes, and how many looked-up tokens a tree has."""
    levels, _, lookup_tokens = shape.label
    return levels, lookup_tokens


def _without_noise(times_us: Sequence[int], shapes: Sequence[TreeShape]) -> list[int]:
    """Return the times by tier, each replaced by the shortest time of the tree itself and of all trees that contain it.
    A busy machine only makes measured times longer, so the shorter time of a larger tree is nearer to the truth.
    """
    return [
        min(
            us
            for us, larger in zip(times_us, shapes, strict=True)
            if all(more >= less for more, less in zip(larger.label, shape.label, strict=True))
        )
        for shape in shapes
    ]


def _times(trial: Trial, loads: list[TrialLoad], warm_up_rounds: int = 0) -> list[int]:
    """Return the typical times of steps in microseconds. Each round runs all loads once; the first `warm_up_rounds` do
    not count.
    """
    for _ in range(warm_up_rounds):
        for load in loads:
            trial.time_once(load)
    started_s, rounds = trial.spent_s, list[list[float]]()
    while len(rounds) < MAX_ROUNDS and (len(rounds) < MIN_ROUNDS or trial.spent_s - started_s < MAX_ROUND_SECONDS):
        rounds.append([trial.time_once(load) for load in loads])
    return typical_times(rounds)


def typical_times(rounds: Sequence[Sequence[float]]) -> list[int]:
    """Return the times of steps at the pace of the fastest round, given their times in each round.

    A machine that shares its cores may be slower for seconds, that is, for some rounds: then all steps of a round take
    longer alike. So a step counts by its share of its round, in the median over the rounds. The median also leaves out
    steps that something disturbed. All ranks compute the same numbers, for which additions and divisions suffice.
    """
    paces = [sum(times) for times in rounds]
    middle = len(rounds) // 2
    shares = [
        sorted(us / pace for us, pace in zip(times, paces, strict=True))[middle] for times in zip(*rounds, strict=True)
    ]
    return [round(share * min(paces)) for share in shares]
