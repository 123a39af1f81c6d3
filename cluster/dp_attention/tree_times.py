"""The time of a step with each tree: measured on this gang before the first request, and corrected by the steps that it
runs. By these times `dp_attention/tree_choice.py` chooses the tree of a step.

A tier is the number of a tree shape that steps may use.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from cluster.dp_attention.kalman import KalmanFilter, Weights
from cluster.dp_attention.tree_choice import ChosenTier

LEAST_SHARE = 0.25
"""A step is expected to take at least this share of its measured time, however short contexts are, and whatever its
corrections are.
"""
PACE_DEVIATION, ADDED_DEVIATION, TIER_DEVIATION = 0.3, 0.5, 0.1
"""How wrong the measurement at start is expected to be (standard deviations): the pace of all steps, the time that is
added to every step (in units of the time of a step without trees), and the time of a single tier.
"""
PACE_DRIFT, ADDED_DRIFT, TIER_DRIFT = 0.004, 0.001, 0.0002
"""By how much the pace, the added time and the time of a single tier change from one step to the next (standard
deviations).
"""
MAX_PACE, LEAST_ADDED = 4.0, -0.5
"""The pace is between 1 / `MAX_PACE` and `MAX_PACE`. The added time is at least `LEAST_ADDED` times that of a step
without trees: it is negative where small steps take less than was measured.
"""
START_NOISE, LEAST_NOISE, MOST_NOISE, NOISE_SHARE = 0.15, 0.02, 0.5, 0.02
"""By how much a single step differs from what is expected, as a share (standard deviation): at first, the least and the
largest value. Each step changes the variance by `NOISE_SHARE` of the difference to what the step shows, which counts
as at most `MAX_NOISE_GROWTH` times the variance so far.
"""
MAX_NOISE_GROWTH = 4.0
MAX_DEVIATIONS = 4.0
"""Steps that take longer or shorter than expected by more than this many standard deviations count as steps that differ
by so many.
"""
OVERHEAD_SHARE = 0.04
"""The overhead is a running mean: each step moves it by the share `OVERHEAD_SHARE` towards the overhead of this step.
For the first 1 / `OVERHEAD_SHARE` steps of a size, it is the plain mean of these steps.
"""
NEIGHBOUR_STEPS = 10
"""A new size begins with the overhead of a similar size, which counts as much as that of this many steps."""
CONTEXT_STEP = 16
"""Contexts are rounded up to multiples of this number."""
MAX_KEPT = 8
"""At most this many results of `TreeTimes.of`, and as many choices, are kept."""


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

    def __init__(self, unit_us: float, tiers: int, neighbour: "_SizeTimes | None") -> None:
        """Begin with the estimates of a similar size, if there is one, but as uncertain as without it."""
        mean = [1.0, 0.0, *[0.0] * tiers]
        self.noise, self.overhead_us, self.seen = START_NOISE * START_NOISE, 0.0, 0
        if neighbour is not None:
            mean = list(neighbour.filter.mean)
            mean[1] *= neighbour.unit_us / unit_us
            self.noise, self.overhead_us = neighbour.noise, neighbour.overhead_us
            self.seen = min(neighbour.seen, NEIGHBOUR_STEPS)
        self.unit_us: float = unit_us
        self.filter: KalmanFilter = KalmanFilter(mean, (PACE_DEVIATION, ADDED_DEVIATION, *[TIER_DEVIATION] * tiers))
        drifts = (PACE_DRIFT, ADDED_DRIFT, *[TIER_DRIFT] * tiers)
        self._drift_variances = [drift * drift for drift in drifts]
        # Of the last steps: the tier, the number of steps, and by which share they differed from what was expected.
        self._last = -1, 1, 0.0
        self._observed_at = 0  # of all steps observed so far, how many when steps of this size were observed last

    def weights(self, tier: int, cost_us: float) -> Weights:
        """Return which sum of the state is the time of a step that was measured with `cost_us` at start."""
        cost = cost_us / self.unit_us
        return (0, cost), (1, 1.0), (2 + tier, cost)

    def times(self, costs_us: Sequence[float]) -> list[float]:
        """Return the expected times of steps by tier, in microseconds, given those measured at start."""
        pace, added, *errors = self.filter.mean
        added_us = added * self.unit_us
        return [
            max(LEAST_SHARE * us, us * (pace + error) + added_us) + self.overhead_us
            for us, error in zip(costs_us, errors, strict=True)
        ]

    def observe(self, step: MeasuredStep, cost_us: float, all_steps: int) -> None:
        """Learn from a step whose tree was measured with `cost_us` at start. It is the last of `all_steps` steps."""
        added_us = min(step.overhead_us - self.overhead_us, cost_us if self.seen else step.overhead_us)
        self.seen += step.steps
        self.overhead_us += min(1.0, max(OVERHEAD_SHARE, 1 / self.seen) * step.steps) * added_us
        self.filter.drift(self._drift_variances, all_steps - self._observed_at)
        self._observed_at = all_steps
        weights = self.weights(step.tier, cost_us)
        expected = self.filter.expected(weights)
        scale = max(expected, LEAST_SHARE * cost_us / self.unit_us)
        noise = self.noise * scale * scale / step.steps
        limit = MAX_DEVIATIONS * sqrt(self.filter.variance(weights) + noise)
        surprise = max(-limit, min(limit, step.us / self.unit_us - expected))
        self.filter.observe(weights, surprise, noise)
        self.filter.mean[0] = max(1 / MAX_PACE, min(MAX_PACE, self.filter.mean[0]))
        self.filter.mean[1] = max(LEAST_ADDED, self.filter.mean[1])
        self._learn_noise(step, surprise / scale)

    def _learn_noise(self, step: MeasuredStep, difference: float) -> None:
        """Learn how much steps differ from each other. Two differences in a row are compared, so that a machine that
        becomes slower is taken for noise only once or twice. The mean of n steps has one nth of their variance.
        """
        (last_tier, last_steps, last_difference), self._last = self._last, (step.tier, step.steps, difference)
        if last_tier == step.tier:
            change = difference - last_difference
            seen_noise = min(change * change / (1 / step.steps + 1 / last_steps), MAX_NOISE_GROWTH * self.noise)
            self.noise += min(1.0, NOISE_SHARE * step.steps) * (seen_noise - self.noise)
            self.noise = max(LEAST_NOISE * LEAST_NOISE, min(MOST_NOISE * MOST_NOISE, self.noise))


class TreeTimes:
    """`costs`, corrected by the steps that the gang (the ranks of a replica) runs. All ranks observe the same steps, so
    they agree on all times. The time of a step is expected to be

        cost of its tier * (pace + error of its tier) + added time + overhead

    The overhead (the time between two steps) is measured. The other three are estimated by a Kalman filter, separately
    for each doubling of the number of decoding requests. The pace is what a slower machine does to all steps alike. The
    added time is what other work on the machine adds to a step, whatever its tree: if ranks wait for each other in each
    layer, and the server streams on the same cores, this can be longer than the step itself. The errors are those of
    the measurement at start. Steps of one tier alone cannot tell these apart; steps of several tiers can.
    """

    def __init__(self, costs: TreeCosts) -> None:
        self.costs = costs
        self._sizes: dict[int, _SizeTimes] = {}
        self._steps = 0
        self._kept = dict[tuple[int, int], list[float]]()  # results of `of` since the last observed step
        self.choices = dict[Hashable, ChosenTier]()
        """Choices of trees that were made with the present times. The keys are the other inputs of these choices. Most
        steps have the inputs of the step before, so their choice need not be computed again.
        """

    def reset(self, costs: TreeCosts) -> None:
        """Begin anew with other costs."""
        self.costs = costs
        self._sizes.clear()
        self._forget()

    def of(self, decodes: int, context: int = 0) -> list[float]:
        """Return the expected time of a step for each tier, in microseconds. These are the times of `TreeCosts.of`,
        corrected by what the observed steps took. The context is rounded up (`CONTEXT_STEP`), so that many steps have
        the same times.
        """
        key = decodes, rounded(context)
        times = self._kept.get(key)
        if times is None:
            times = self._size(decodes).times(self.costs.of(*key))
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[key] = times
        return times

    def errors(self, decodes: int, context: int, reference: int) -> list[float]:
        """Return by tier how wrong the ratio of its time to that of the tier `reference` may be: the standard deviation
        of its error, as a share. Other arguments are those of `of`.
        """
        size = self._size(decodes)
        times, costs = self.of(decodes, context), self.costs.of(decodes, rounded(context))
        shares = [
            [(i, weight * size.unit_us / max(1.0, us)) for i, weight in size.weights(tier, cost)]
            for tier, (cost, us) in enumerate(zip(costs, times, strict=True))
        ]
        negative = [(i, -weight) for i, weight in shares[reference]]
        return [
            0.0 if tier == reference else sqrt(size.filter.variance([*share, *negative]))
            for tier, share in enumerate(shares)
        ]

    def observe(self, step: MeasuredStep) -> None:
        """Learn from `step`. Steps that differ much from what is expected count up to a limit (`MAX_DEVIATIONS`). After
        the first step of all, an overhead that is longer than expected by more than the measured time of its tier
        counts as longer by this time.
        """
        self._steps += step.steps
        size = self._sizes[step.decodes.bit_length()] = self._size(step.decodes)
        size.observe(step, max(1.0, self.costs.of_tier(step.tier, step.decodes, step.context)), self._steps)
        self._forget()

    def keep(self, key: Hashable, choice: ChosenTier) -> None:
        """Keep a choice in `choices`."""
        if len(self.choices) >= MAX_KEPT:
            self.choices.clear()
        self.choices[key] = choice

    def _forget(self) -> None:
        self._kept.clear()
        self.choices.clear()

    def _size(self, decodes: int) -> _SizeTimes:
        """Return what is known of steps with `decodes` requests. If none was observed yet, begin with what is known of
        the most similar number of requests; the caller may keep this or not.
        """
        key = decodes.bit_length()
        if key in self._sizes:
            return self._sizes[key]
        nearest = min(self._sizes, key=lambda other: (abs(other - key), other), default=None)
        neighbour = None if nearest is None else self._sizes[nearest]
        return _SizeTimes(max(1.0, self.costs.of_tier(0, decodes)), len(self.costs.us), neighbour)


def rounded(context: int) -> int:
    """Return `context`, rounded up to a multiple of `CONTEXT_STEP`."""
    return -(-context // CONTEXT_STEP) * CONTEXT_STEP
