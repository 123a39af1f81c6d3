"""Measures what each tree costs on this gang, before the first request: the `TreeCosts` by which steps choose trees."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from cluster.arch.resolve import ResolvedConfig
from cluster.config.tree_shape import TreeShape
from cluster.dp_attention.tree_times import TreeCosts
from cluster.engine.calibrate import DECODES_FACTOR, Trial, TrialLoad, max_trial_tokens, trial_steps
from cluster.engine.lockstep import Lockstep
from cluster.engine.tree_extrapolation import extrapolated
from cluster.kv.cache import KVCache
from cluster.status import TreeCost

MAX_CONTEXT = 256
"""The committed tokens of each request in a measured step: about those of a short conversation."""
LONG_CONTEXT, MAX_LONG_SECONDS = 2048, 0.15
"""To learn what a committed token costs, steps are also measured with requests of `LONG_CONTEXT` tokens. The number of
requests is the largest whose steps of all tiers, with short contexts, take less than `MAX_LONG_SECONDS` in all. If
there is none, this is not measured.
"""
LINEAR_GROWTH = 0.7
"""If the time of a step grows by at least this share of the factor by which the requests grow, larger numbers of
requests are not measured: their times are extrapolated.
"""
MAX_TREE_SECONDS = 3.0
"""After this many seconds no further number of requests is measured."""
SECOND_COUNT_SECONDS = 8.0
"""The second number of requests is measured up to this many seconds: with one number, nothing can be extrapolated."""
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

    The numbers of decoding requests grow from 1 to the most that may run. No further number is measured after
    `MAX_TREE_SECONDS`, or once the time of the largest tree grows nearly as fast as the number of requests, because
    larger numbers can then be extrapolated. The times of the most requests are then computed (`extrapolated`).
    """
    max_decodes = resolved.settings.max_running_requests
    max_context = max_trial_tokens(cache, resolved)
    context = min(MAX_CONTEXT, max_context // 2)
    long_context = min(LONG_CONTEXT, max_context)
    counts, us_by_count, deepest = list[int](), list[list[int]](), _deepest(resolved.tiers)
    measured = [t for t, s in enumerate(resolved.tiers) if s in deepest or not s.selects_nodes or s.lookup_tokens]
    with trial_steps(lockstep, cache, resolved, long_context) as trial:
        count = 1
        while counts[-1:] != [max_decodes]:
            if trial.spent_s > (MAX_TREE_SECONDS if len(counts) > 1 else SECOND_COUNT_SECONDS):
                break
            if len(counts) > 1 and us_by_count[-1][-1] > LINEAR_GROWTH * DECODES_FACTOR * us_by_count[-2][-1]:
                break
            counts.append(min(count, max_decodes))
            warm_up_rounds = 2 * lockstep.programs.assembler.buffer_sets
            times = _times(trial, [TrialLoad(counts[-1], context, tier=tier) for tier in measured], warm_up_rounds)
            us_by_count.append(completed(dict(zip(measured, times, strict=True)), resolved.tiers))
            count *= DECODES_FACTOR
        token_ns = tuple[int, ...]()
        affordable = [i for i, times in enumerate(us_by_count) if sum(times) < 1e6 * MAX_LONG_SECONDS]
        if affordable and long_context > context:
            count = counts[affordable[-1]]  # its programs are captured by now
            lengths = context, long_context
            loads = [TrialLoad(count, length, tier=tier) for length in lengths for tier in measured]
            times = _times(trial, loads)
            more_tokens = count * (long_context - context)
            added_ns = [
                max(0, 1000 * (long_us - short_us) // more_tokens)
                for short_us, long_us in zip(times[: len(measured)], times[len(measured) :], strict=True)
            ]
            token_ns = tuple(completed(dict(zip(measured, added_ns, strict=True)), resolved.tiers))
        waking = list(accumulate((round(trial.waking_us[count]) for count in counts if trial.waking_us), max))
    if len(counts) > 1 and counts[-1] < max_decodes:
        us_by_count.append(extrapolated(list(zip(counts, us_by_count, strict=True)), resolved.tiers, max_decodes))
        if waking:  # a line through the last two
            grown = (waking[-1] - waking[-2]) * (max_decodes - counts[-1]) // (counts[-1] - counts[-2])
            waking.append(waking[-1] + grown)
        counts.append(max_decodes)
    # More requests never take less time; a measured time below that of fewer requests is noise.
    us = tuple(tuple(accumulate(times, max)) for times in zip(*us_by_count, strict=True))
    return TreeCosts(tuple(counts), us, tuple(waking), context, token_ns)


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
