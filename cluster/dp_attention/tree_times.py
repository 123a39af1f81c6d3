"""The time of a step with each tree: measured on this gang before the first request, and corrected by the steps that it
runs. By these times `dp_attention/tree_choice.py` chooses the tree of a step.

A tier is the number of a tree shape that steps may use.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from cluster.dp_attention.kalman import KalmanFilter, Weights

LEAST_SHARE = 0.25
"""If contexts are shorter than in the measured steps, a step is expected to take at least this share of their time."""
PACE_DEVIATION, ADDED_DEVIATION, TIER_DEVIATION = 0.3, 0.5, 0.1
"""How wrong the measurement at start is expected to be (standard deviations): the pace of all steps, the time that is
added to each step (in steps without trees), and the time of a single tier.
"""
PACE_DRIFT, ADDED_DRIFT, TIER_DRIFT = 0.004, 0.002, 0.0002
"""By how much each of them is expected to change from one step to the next (standard deviations)."""
START_NOISE, LEAST_NOISE, MOST_NOISE, NOISE_SHARE = 0.15, 0.02, 0.5, 0.02
"""By how much single steps differ from what is expected (standard deviation, as a share): at first, and at least and at
most. Each step changes the estimate of the variance by `NOISE_SHARE` of the difference.
"""
MAX_DEVIATIONS = 3.0
"""A step that takes longer or shorter than expected by more than this many standard deviations counts as one that
differs by so many.
"""
OVERHEAD_SHARE = 0.04
"""Each step changes the overhead by this share of the difference to what it was so far. The first steps of a size count
more: until there are 1 / share of them, the value is their mean.
"""
CONTEXT_STEP = 16
MAX_KEPT = 8
"""`TreeTimes.of` rounds contexts up to multiples of `CONTEXT_STEP`. So many of its results are kept until more steps
are observed.
"""
OTHER_STEPS = 10
"""The overhead of another size, with which a new size begins, counts as much as that of this many steps."""


@dataclass(frozen=True)
class TreeCosts:
    """The time of a step that only decodes, in microseconds: `us[tier][i]` if each group has `counts[i]` decoding
    requests. `counts` ascend, and a time is never below that of a smaller count. `wake_us[i]` is the time of a step in
    which a draft that has rested reads the tokens that it has missed (wakes); `wake_us` is empty if the draft never
    rests.

    Each of these requests had `context` committed tokens. Each further token of a request adds `token_ns[tier]`
    nanoseconds. If `token_ns` is empty, times do not depend on the context.
    """

    counts: tuple[int, ...]
    us: tuple[tuple[int, ...], ...]
    wake_us: tuple[int, ...] = ()
    context: int = 0
    token_ns: tuple[int, ...] = ()
    _cache: dict[int, list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, decodes: int, context: int = 0) -> list[float]:
        """Return the time of a step by tier, in microseconds, with `decodes` decoding requests per group. Times are
        linear between the measured counts. Beyond the largest count, the line through the last two continues. If there
        is one count, its times hold for all. `context` is the mean number of committed tokens of a request; 0 stands
        for as many as in the measured steps.
        """
        times = self._of_measured_context(decodes)
        return [self._of_context(us, tier, decodes, context) for tier, us in enumerate(times)]

    def of_tier(self, tier: int, decodes: int, context: int = 0) -> float:
        """Return `of(decodes, context)[tier]`."""
        return self._of_context(self._of_measured_context(decodes)[tier], tier, decodes, context)

    def _of_context(self, us: float, tier: int, decodes: int, context: int) -> float:
        """Return the time of a step that takes `us` with requests as long as in the measured steps."""
        if not self.token_ns or not context:
            return us
        more = decodes * (context - self.context) / 1000
        return max(us * LEAST_SHARE, us + more * self.token_ns[tier])

    def _of_measured_context(self, decodes: int) -> list[float]:
        """Return the time of a step by tier, with requests as long as in the measured steps."""
        if decodes not in self._cache:
            self._cache[decodes] = self._interpolated(decodes, self.us)
        return self._cache[decodes]

    def waking(self, decodes: int) -> float:
        """Return the microseconds of a step in which the draft wakes, with `decodes` decoding requests per group; 0 if
        the draft never rests.
        """
        return self._interpolated(decodes, (self.wake_us,))[0] if self.wake_us else 0.0

    def _interpolated(self, decodes: int, us: tuple[tuple[int, ...], ...]) -> list[float]:
        if len(self.counts) == 1 or decodes <= self.counts[0]:
            return [float(times[0]) for times in us]
        right = min(bisect_left(self.counts, decodes), len(self.counts) - 1)
        low, high = self.counts[right - 1], self.counts[right]
        share = (decodes - low) / (high - low)
        return [times[right - 1] + (times[right] - times[right - 1]) * share for times in us]


class MeasuredStep(NamedTuple):
    """A step that was measured: its tier, the number of decoding requests of the group that has most, its time `us` in
    microseconds, the context (`StepPlan.context`), and `overhead_us`: the microseconds from the end of the step before
    to the beginning of this one, and those in which the ranks agreed on it. `us` does not include them.

    If `steps` is not 1, the numbers are the means of so many steps of one tier; 0 stands for no step.
    """

    tier: int = 0
    decodes: int = 0
    us: int = 0
    context: int = 0
    overhead_us: int = 0
    steps: int = 1


NOT_MEASURED = MeasuredStep(steps=0)


class _SizeTimes:
    """What is learned from the steps with similar numbers of requests.

    The state of `filter` is: the pace, the added time, and the error of each tier. Times are in units of `unit_us`.
    `noise` is the variance of single steps, as a share of the expected time. `overhead_us` are the microseconds between
    two steps, and `seen` counts the steps in their mean.
    """

    def __init__(self, unit_us: float, tiers: int, other: "_SizeTimes | None") -> None:
        """Begin with the estimates of another size, if there is one, with the uncertainty of a new one."""
        mean = [1.0, 0.0, *[0.0] * tiers]
        self.noise, self.overhead_us, self.seen = START_NOISE**2, 0.0, 0
        if other is not None:
            mean = list(other.filter.mean)
            mean[1] *= other.unit_us / unit_us
            self.noise, self.overhead_us, self.seen = other.noise, other.overhead_us, min(other.seen, OTHER_STEPS)
        self.unit_us = unit_us
        self.filter = KalmanFilter(mean, (PACE_DEVIATION, ADDED_DEVIATION, *[TIER_DEVIATION] * tiers))
        self._drift = (PACE_DRIFT**2, ADDED_DRIFT**2, *[TIER_DRIFT**2] * tiers)

    def weights(self, tier: int, cost_us: float) -> Weights:
        """Return which sum of the state is the time of a step that was measured with `cost_us` at start."""
        cost = cost_us / self.unit_us
        return (0, cost), (1, 1.0), (2 + tier, cost)

    def expected_us(self, tier: int, cost_us: float) -> float:
        """Return the expected time of a step, without overhead, in microseconds."""
        return max(LEAST_SHARE * cost_us, self.unit_us * self.filter.expected(self.weights(tier, cost_us)))

    def observe(self, step: MeasuredStep, cost_us: float) -> None:
        """Learn from a step whose tree was measured with `cost_us` at start."""
        weights, expected_us = self.weights(step.tier, cost_us), self.expected_us(step.tier, cost_us)
        self.filter.drift([variance * step.steps for variance in self._drift])
        known, expected = self.filter.variance(weights), expected_us / self.unit_us
        noise = self.noise * expected**2 / step.steps
        limit = MAX_DEVIATIONS * sqrt(known + noise)
        surprise = max(-limit, min(limit, (step.us - expected_us) / self.unit_us))
        self.filter.observe(weights, surprise, noise)
        seen_noise = (surprise**2 - known) / expected**2 * step.steps
        self.noise += min(1.0, NOISE_SHARE * step.steps) * (seen_noise - self.noise)
        self.noise = max(LEAST_NOISE**2, min(MOST_NOISE**2, self.noise))


class TreeTimes:
    """`costs`, corrected by the steps that the gang (the ranks of a replica) runs. All ranks observe the same steps, so
    they agree on all times. The time of a step is expected to be

        cost of its tier * (pace + error of its tier) + added time + overhead

    The overhead (the time between two steps) is measured. The other three are estimated by a Kalman filter, separately
    for each doubling of the number of decoding requests. The pace is what a slower machine does to all steps alike. The
    added time is what other work on the machine adds to a step, whatever its tree; if ranks wait for each other in
    each layer, and the server streams on the same cores, this can be longer than the step itself. The errors are those
    of the measurement at start. Steps of one tier alone cannot tell these apart; steps of several tiers can.
    """

    def __init__(self, costs: TreeCosts) -> None:
        self.costs = costs
        self._sizes: dict[int, _SizeTimes] = {}
        self._times = dict[tuple[int, int], list[float]]()  # since the last observed step, by arguments of `of`

    def reset(self, costs: TreeCosts) -> None:
        """Begin anew with other costs."""
        self.costs = costs
        self._sizes.clear()
        self._times.clear()

    def of(self, decodes: int, context: int = 0) -> list[float]:
        """Return the time of a step by tier, in microseconds, as `TreeCosts.of` does, but with all corrections. The
        context is rounded to a multiple of `CONTEXT_STEP`, so that many steps have the same times.
        """
        context = -(-context // CONTEXT_STEP) * CONTEXT_STEP
        times = self._times.get((decodes, context))
        if times is None:
            times, size = self.costs.of(decodes, context), self._sizes.get(decodes.bit_length())
            if size is not None:
                times = [size.expected_us(tier, us) + size.overhead_us for tier, us in enumerate(times)]
            if len(self._times) >= MAX_KEPT:
                self._times.clear()
            self._times[decodes, context] = times
        return times

    def errors(self, decodes: int, context: int, reference: int) -> list[float]:
        """Return by tier how wrong the ratio of its time to that of the tier `reference` may be: the standard deviation
        of its error, as a share. Other arguments are those of `of`.
        """
        costs, size = self.costs.of(decodes, context), self._sizes.get(decodes.bit_length())
        if size is None:
            size = _SizeTimes(max(1.0, costs[0]), len(costs), None)
        times = self.of(decodes, context)
        shares = [
            [(i, weight * size.unit_us / us) for i, weight in size.weights(tier, cost)]
            for tier, (cost, us) in enumerate(zip(costs, times, strict=True))
        ]
        negative = [(i, -weight) for i, weight in shares[reference]]
        return [
            0.0 if tier == reference else sqrt(size.filter.variance([*share, *negative]))
            for tier, share in enumerate(shares)
        ]

    def observe(self, step: MeasuredStep) -> None:
        """Learn from `step`. Outliers count up to a limit (`MAX_DEVIATIONS`). Except for the first step of a size, an
        overhead that is longer than expected by more than the time of the step counts as longer by this time.
        """
        cost_us, key = self.costs.of_tier(step.tier, step.decodes, step.context), step.decodes.bit_length()
        size = self._sizes.get(key)
        if size is None:
            unit_us = max(1.0, self.costs.of_tier(0, step.decodes, step.context))
            nearest = min(self._sizes, key=lambda other: (abs(other - key), other), default=None)
            other = None if nearest is None else self._sizes[nearest]
            size = self._sizes[key] = _SizeTimes(unit_us, len(self.costs.us), other)
        added_us = min(step.overhead_us - size.overhead_us, cost_us if size.seen else step.overhead_us)
        size.seen += step.steps
        size.overhead_us += min(1.0, max(OVERHEAD_SHARE, 1 / size.seen) * step.steps) * added_us
        size.observe(step, cost_us)
        self._times.clear()
