"""The time of a step with each tree: measured on this gang before the first request, and corrected by the steps that it
runs. By these times `dp_attention/tree_choice.py` chooses the tree of a step.

A tier is the number of a tree shape that steps may use.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

LEAST_SHARE = 0.25
"""If contexts are shorter than in the measured steps, a step is expected to take at least this share of their time."""
MAX_CORRECTION = 2.0
"""A correction is a factor from 1 / `MAX_CORRECTION` to `MAX_CORRECTION`."""
COMPARED_STEPS = 12
"""This many steps after a change of the tier correct the time of the new tier."""
PRIOR_STEPS, REMEMBERED_STEPS = 2, 60
"""What was measured at start weighs as much as `PRIOR_STEPS` compared steps. The correction of a tier is the mean of
both, and after `REMEMBERED_STEPS` compared steps a running mean.
"""
SLOWDOWN_SHARE, OVERHEAD_SHARE = 0.04, 0.04
"""Each step changes the slowdown by `SLOWDOWN_SHARE` of the difference between the slowdown that this step shows and
the slowdown so far; the same with the overhead. The first steps of a size count more: until there are 1 / share of
them, the value is their mean.
"""
START_ERROR, ERROR_STEPS = 0.4, 6
"""A time that was measured at start may be wrong by the share `START_ERROR`. After `ERROR_STEPS` compared steps of its
tier, it may be wrong by half of this share.
"""


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
    to the beginning of this one, and those in which the ranks agreed on it. `us` does not include them. A time of 0
    stands for no step.
    """

    tier: int = 0
    decodes: int = 0
    us: int = 0
    context: int = 0
    overhead_us: int = 0


@dataclass(slots=True)
class _SizeTimes:
    """What is learned from the steps with similar numbers of requests.

    `slowdown` is a factor for all tiers: what other programs on the machine, and an inexact measurement at start, do to
    all steps alike. `corrections` are factors for single tiers, and `compared` the numbers of steps that they were
    learned from. `overhead_us` are the microseconds between two steps. `seen` counts the steps in the running means of
    slowdown and overhead. `tier` is that of the last step; `compares` counts the next steps that correct it.
    """

    corrections: list[float]
    compared: list[int]
    tier: int
    slowdown: float = 1.0
    overhead_us: float = 0.0
    seen: int = 0
    compares: int = 0


class TreeTimes:
    """`costs`, corrected by the steps that the gang (the ranks of a replica) runs. All ranks observe the same steps, so
    they agree on all times. The time of a step is expected to be

        cost of its tier * slowdown * correction of its tier + overhead

    Slowdown, corrections and overhead are learned separately for each doubling of the number of decoding requests. The
    overhead is measured. What is left is known only for the tier that runs, so how much of it is slowdown, which holds
    for all tiers, is inferred from changes of the tier. A machine is hardly faster or slower than a few steps ago: if
    steps of the new tier take longer than expected, the time measured for this tier was too short. As long as the tier
    stays, changes are slowdown. The better the time of a tier is known, the more of a difference counts as slowdown.
    """

    def __init__(self, costs: TreeCosts) -> None:
        self.costs = costs
        self._sizes: dict[int, _SizeTimes] = {}

    def reset(self, costs: TreeCosts) -> None:
        """Begin anew with other costs."""
        self.costs = costs
        self._sizes.clear()

    def of(self, decodes: int, context: int = 0) -> list[float]:
        """Return the time of a step by tier, in microseconds, as `TreeCosts.of` does, but with all corrections."""
        times, size = self.costs.of(decodes, context), self._sizes.get(decodes.bit_length())
        if size is None:
            return times
        return [
            us * size.slowdown * correction + size.overhead_us
            for us, correction in zip(times, size.corrections, strict=True)
        ]

    def errors(self, decodes: int) -> list[float]:
        """Return by tier how wrong its time may be compared with the others, as a share."""
        size = self._sizes.get(decodes.bit_length())
        if size is None:
            return [START_ERROR] * len(self.costs.us)
        return [START_ERROR * ERROR_STEPS / (ERROR_STEPS + count) for count in size.compared]

    def observe(self, step: MeasuredStep) -> None:
        """Learn from `step`. Except for the first step of a size, a time that differs from what was expected by more
        than the factor `MAX_CORRECTION` counts as one that differs by this factor, and an overhead that is longer than
        expected by more than the time of the step counts as longer by this time.
        """
        tier, us = step.tier, self.costs.of_tier(step.tier, step.decodes, step.context)
        size, tiers = self._sizes.get(step.decodes.bit_length()), len(self.costs.us)
        if size is None:
            size = self._sizes[step.decodes.bit_length()] = _SizeTimes([1.0] * tiers, [0] * tiers, tier)
        if tier != size.tier:
            size.tier, size.compares = tier, COMPARED_STEPS
        size.seen += 1
        added_us = min(step.overhead_us - size.overhead_us, us if size.seen > 1 else step.overhead_us)
        size.overhead_us += max(OVERHEAD_SHARE, 1 / size.seen) * added_us
        ratio, share = step.us / us, max(SLOWDOWN_SHARE, 1 / size.seen)
        slowdown, correction = size.slowdown, size.corrections[tier]
        if size.compares:
            size.compares -= 1
            factor = min(MAX_CORRECTION, max(1 / MAX_CORRECTION, ratio / slowdown))
            share *= size.compared[tier] / (PRIOR_STEPS + size.compared[tier])
            size.compared[tier] = min(size.compared[tier] + 1, REMEMBERED_STEPS)
            size.corrections[tier] += (factor - correction) / (PRIOR_STEPS + size.compared[tier])
        observed = ratio / correction
        if size.seen > 1:
            observed = min(slowdown * MAX_CORRECTION, max(slowdown / MAX_CORRECTION, observed))
        size.slowdown += share * (observed - slowdown)
