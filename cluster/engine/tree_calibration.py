"""Measures what each tree costs on this gang, before the first request: the `TreeCosts` by which steps choose trees."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from cluster.arch.resolve import ResolvedConfig
from cluster.config.tree_shape import TreeShape
from cluster.dp_attention.tree_times import TreeCosts
from cluster.engine.calibrate import DECODES_FACTOR, MAX_SECONDS, Trial, TrialLoad, max_trial_tokens, trial_steps
from cluster.engine.lockstep import Lockstep
from cluster.kv.cache import KVCache
from cluster.status import TreeCost

MAX_CONTEXT = 256
"""The committed tokens of each request in a measured step: about those of a short conversation."""
LONG_CONTEXT, LONG_ROUNDS, MAX_LONG_SECONDS = 2048, 2, 0.5
"""To learn what a committed token costs, steps are also measured with requests of `LONG_CONTEXT` tokens, in
`LONG_ROUNDS` rounds. The number of requests is the largest with which the same rounds with short contexts would take
less than `MAX_LONG_SECONDS` in all. If there is none, this is not measured.
"""
LINEAR_GROWTH = 0.7
"""If the time of a step grows by at least this share of the factor by which the requests grow, larger numbers of
requests are not measured: their times are extrapolated.
"""
MORE_ROUNDS, MAX_COUNT_SECONDS = 3, 0.4
"""For each number of requests, the first two rounds (four with FlashInfer, which has two sets of buffers) are for steps
that were not captured at start: an eager run, and the run that is captured. Then follow one to `MORE_ROUNDS` rounds
that measure replays. After the first of these, no round begins if all have taken more than `MAX_COUNT_SECONDS`.
"""


def measure_trees(lockstep: Lockstep, cache: KVCache, resolved: ResolvedConfig) -> TreeCosts:
    """Return the costs of all tiers, the same on every rank. All ranks must call this, with an empty cache.

    A tier is the number of a tree shape that steps may use. The largest tree of every depth, all trees of the largest
    depth and all trees with looked-up tokens are measured. The times of the other trees follow from these
    (`completed`). The time of a step is that of the slowest rank, in the fastest round.

    The numbers of decoding requests grow from 1 to the most that may run. After `MAX_SECONDS` no further number is
    measured. Nor is one measured once the time of the largest tree grows nearly as fast as the number of requests,
    because larger numbers can then be extrapolated.
    """
    max_decodes = resolved.settings.max_running_requests
    max_context = max_trial_tokens(cache, resolved)
    context = min(MAX_CONTEXT, max_context // 2)
    long_context = min(LONG_CONTEXT, max_context)
    counts, us_by_count, deepest = list[int](), list[list[int]](), _deepest(resolved.tiers)
    measured = [t for t, s in enumerate(resolved.tiers) if s in deepest or not s.selects_nodes or s.lookup_tokens]
    with trial_steps(lockstep, cache, resolved, long_context) as trial:
        count = 1
        while not counts or (counts[-1] < max_decodes and trial.spent_s < MAX_SECONDS):
            if len(counts) > 1 and us_by_count[-1][-1] > LINEAR_GROWTH * DECODES_FACTOR * us_by_count[-2][-1]:
                break
            counts.append(min(count, max_decodes))
            times = _times(trial, [TrialLoad(counts[-1], context, tier=tier) for tier in measured])
            us_by_count.append(completed(dict(zip(measured, times, strict=True)), resolved.tiers))
            count *= DECODES_FACTOR
        # More requests never take less time; a measured time below that of fewer requests is noise.
        us = tuple(tuple(accumulate(times, max)) for times in zip(*us_by_count, strict=True))
        token_ns = tuple[int, ...]()
        # The programs are captured by now, so two rounds are enough.
        affordable = [i for i, times in enumerate(us_by_count) if LONG_ROUNDS * sum(times) < 1e6 * MAX_LONG_SECONDS]
        if affordable and long_context > context:
            count, short_us = counts[affordable[-1]], us_by_count[affordable[-1]]
            loads = [TrialLoad(count, long_context, tier=tier) for tier in measured]
            long_us = _times(trial, loads, LONG_ROUNDS)
            more_tokens = count * (long_context - context)
            added_ns = [1000 * (us - short_us[t]) // more_tokens for t, us in zip(measured, long_us, strict=True)]
            token_ns = tuple(completed(dict(zip(measured, added_ns, strict=True)), resolved.tiers))
        waking = tuple(accumulate((round(trial.waking_us[count]) for count in counts if trial.waking_us), max))
    return TreeCosts(tuple(counts), us, waking, context, token_ns)


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


def _times(trial: Trial, loads: list[TrialLoad], rounds: int | None = None) -> list[int]:
    """Return the shortest times of steps in microseconds, from `rounds` rounds; if `rounds` is None, see `MORE_ROUNDS`.
    Each round runs all loads once. So a machine that is busy for a moment disturbs one round of several loads, and not
    all rounds of one load.
    """
    started_s, first_replay = trial.spent_s, 2 * trial.lockstep.programs.assembler.buffer_sets
    best_us = [trial.time(load) for load in loads]
    for rounds_done in range(1, rounds or first_replay + MORE_ROUNDS):
        if rounds_done > first_replay and trial.spent_s - started_s > MAX_COUNT_SECONDS:
            break
        best_us = [trial.time_again(load) for load in loads]
    return [round(us) for us in best_us]
