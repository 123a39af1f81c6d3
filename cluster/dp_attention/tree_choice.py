"""Chooses the tree of a step: the one that is expected to give the most tokens per second (`speculative_mode:
adaptive`).

The tree shapes that a step may use are called tiers. All ranks choose the same tier, because the choice depends only on
what they have told each other. Three things decide it:

- The costs: how long a step takes, by tier, number of decoding requests and length of their contexts. The gang measures
  them at start (`engine/tree_calibration.py`), and corrects them by the steps that it runs (`TreeTimes`).
- The outlook of each attention group: the tokens that its requests are expected to get in a step, by tier
  (`engine/tree_outlook.py`).
- The time of the prompt rows in the step, which is the same for all tiers. The longer a step takes anyway, the less a
  larger tree adds to it.

Where steps are captured, each tree needs a program of its own for the sizes and the mode of the step. A capture takes
as long as several steps, and when the load changes, the next steps may have other sizes. So if the best tree has no
program for these sizes, and another tree has one, the step uses that other tree, and `PostponedTrees` adds up what this
loses. When the sum reaches the price of a capture, steps use the best tree, and it is captured. In all, this loses at
most about twice as much as a choice would lose that knew how long the sizes last (the "ski rental problem"), if one
tree stays the best.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.dp_attention.sizes import ProgramKey

MIN_GAIN, MIN_GAIN_TO_WAKE = 1.01, 1.03
"""A step uses another tree than the step before only if that gives more than this factor times the tokens per second,
or if the step may not use the tree of the step before. Estimates change a little after every step, and a change of the
tree may need a program that is not captured yet. `MIN_GAIN_TO_WAKE` holds while the draft rests, that is, does not read
the tokens of decoding requests: to wake it costs a step, in which it reads them.
"""
OVERHEAD_CHANGE, CHANGE, MAX_CORRECTION = 0.02, 0.005, 1.5
"""How much one observed step changes the overhead (`OVERHEAD_CHANGE`, a share of the measured cost of the step) and the
correction of its tier (`CHANGE`, a share of the correction). A correction is a factor from 1 / `MAX_CORRECTION` to
`MAX_CORRECTION`.
"""
LEAST_SHARE = 0.25
"""If contexts are shorter than in the measured steps, a step is expected to take at least this share of their time."""
SETTLING_STEPS = 12
"""The first steps of a tier, this many, correct only the tier, except for the first tier that is observed."""
MAX_POSTPONED = 512
"""The largest number of sums that `PostponedTrees` keeps."""
OUTLOOK_UNIT = 1000
"""Outlooks (expected tokens by tier) are integers, in thousandths of a token, so that they are exact on every rank."""


class LastTree(NamedTuple):
    """The tier of the last step in which requests decoded, and whether the draft rested in that step (did not read the
    tokens of decoding requests).
    """

    tier: int = 0
    rests: bool = False


NO_LAST_TREE = LastTree()


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
        if decodes not in self._cache:
            self._cache[decodes] = self._interpolated(decodes, self.us)
        times = self._cache[decodes]
        if not self.token_ns or not context:
            return times
        more = decodes * (context - self.context) / 1000
        return [max(us * LEAST_SHARE, us + more * ns) for us, ns in zip(times, self.token_ns, strict=True)]

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
    """A step that was measured: its tier, the number of decoding requests of the group that has most, its time in
    microseconds, and the context (`StepPlan.context`). A time of 0 stands for no step.
    """

    tier: int = 0
    decodes: int = 0
    us: int = 0
    context: int = 0


@dataclass(slots=True)
class _SizeTimes:
    """What is learned from the steps with similar numbers of requests: a factor for the time of each tier
    (`corrections`), and the overhead of a step in microseconds. `settling[tier]` says how many of the next steps of a
    tier still correct only this tier. `first_tier` is the tier that was observed first.
    """

    corrections: list[float]
    settling: list[int]
    first_tier: int
    overhead_us: float = 0.0


class TreeTimes:
    """`costs`, corrected by the steps that the gang (the ranks of a replica) runs. All ranks observe the same steps, so
    they agree on all times.

    Two numbers are kept for each doubling of the number of decoding requests, both as running medians: a correction for
    each tier (a factor), and the overhead of a step, whatever its tier. The overhead is the time of what a server does
    between two steps, and the time that a busy machine adds. It holds for all tiers, also for those not used lately.

    If the first steps of a tier are slower than expected, the measured costs of this tier were wrong. So these steps
    only correct this tier. If they counted as overhead too, all other tiers would seem as much slower, and the slow
    tier would be chosen again. The tier that is observed first cannot be compared with others, so all its steps also
    change the overhead.
    """

    def __init__(self, costs: TreeCosts) -> None:
        self.costs = costs
        self._sizes: dict[int, _SizeTimes] = {}

    def of(self, decodes: int, context: int = 0) -> list[float]:
        """Return the time of a step by tier, in microseconds, as `TreeCosts.of` does, but with all corrections."""
        times, seen = self.costs.of(decodes, context), self._sizes.get(decodes.bit_length())
        if seen is None:
            return times
        return [us * correction + seen.overhead_us for us, correction in zip(times, seen.corrections, strict=True)]

    def observe(self, step: MeasuredStep) -> None:
        """Correct the overhead, and the time of the tier, by `step`. Each step changes both by a fixed share, up or
        down, so that outliers count no more than other steps. The first steps of a tier change only the correction of
        this tier, which is then the mean of 1 and of the factors that these steps show.
        """
        times, tier, size = self.costs.of(step.decodes, step.context), step.tier, step.decodes.bit_length()
        if size not in self._sizes:
            self._sizes[size] = _SizeTimes([1.0] * len(times), [SETTLING_STEPS] * len(times), tier)
        seen = self._sizes[size]
        corrections, correction = seen.corrections, seen.corrections[tier]
        if tier != seen.first_tier and seen.settling[tier]:
            ratio = min(MAX_CORRECTION, max(1 / MAX_CORRECTION, (step.us - seen.overhead_us) / times[tier]))
            corrections[tier] += (ratio - correction) / (SETTLING_STEPS - seen.settling[tier] + 2)
            seen.settling[tier] -= 1
            return
        slower = step.us > times[tier] * correction + seen.overhead_us
        seen.overhead_us = max(0.0, seen.overhead_us + OVERHEAD_CHANGE * times[tier] * (1 if slower else -1))
        correction *= 1 + CHANGE if slower else 1 / (1 + CHANGE)
        corrections[tier] = min(MAX_CORRECTION, max(1 / MAX_CORRECTION, correction))


class ChosenTier(NamedTuple):
    """The tier of a step. If a better tree is postponed because it has no captured program, `lost_us` is the time that
    the better tree would save for the same number of tokens, in microseconds. Otherwise `lost_us` is 0.
    """

    tier: int
    lost_us: int = 0


def choose_tier(
    times: Sequence[float],
    outlooks: Sequence[Sequence[int]],
    last: LastTree,
    prompt_us: int = 0,
    may_use: Callable[[int, int], bool] | None = None,
) -> ChosenTier:
    """Return the tier that is expected to give the most tokens per second, among those that the step may use.

    `times` are the microseconds of a step with each tier that is allowed (`TreeTimes.of`). `outlooks` are the expected
    tokens of each group, by tier. `prompt_us` is the time of prompt rows in the step. `last` describes the last step in
    which requests decoded; see `MIN_GAIN`. `may_use(tier, best)` says whether the step may use `tier` if `best` is the
    tier with the most tokens per second. If `may_use` is None, or False for every tier, the step may use all tiers.
    """
    tiers = range(len(times))
    rates = [sum(outlook[tier] for outlook in outlooks) / (times[tier] + prompt_us) for tier in tiers]
    best = max(tiers, key=rates.__getitem__)
    usable: Sequence[int] = tiers
    # In most steps both the best tree and that of the step before may be used: then one of these two is chosen below.
    if may_use is not None and not (may_use(best, best) and may_use(last.tier, best)):
        usable = [tier for tier in tiers if may_use(tier, best)] or tiers
    tier = max(usable, key=rates.__getitem__)
    min_gain = MIN_GAIN_TO_WAKE if last.rests else MIN_GAIN
    if last.tier in usable and rates[last.tier] * min_gain >= rates[tier]:
        tier = last.tier
    if best in usable or rates[tier] * min_gain >= rates[best]:
        return ChosenTier(tier)
    return ChosenTier(tier, max(1, round((times[tier] + prompt_us) * (1 - rates[tier] / rates[best]))))


class PostponedTrees:
    """Adds up what steps lose because a better tree has no program yet. There is a sum for each combination of a
    sampling mode and sizes. All ranks have the same programs and see the same plans, so they agree on all sums.

    `has_program` says whether a program is captured for the key of a plan. `capture_us` is the price of a capture in
    microseconds, the same on all ranks. It is 0 before the first capture; every program may then be used.
    """

    def __init__(self, has_program: Callable[[ProgramKey], bool]) -> None:
        self._has_program = has_program
        self.capture_us = 0
        self._lost_us: OrderedDict[tuple[object, ...], int] = OrderedDict()

    def may_use(self, key: ProgramKey) -> bool:
        """Whether a step may use the program of `key`: it is captured, or steps of its mode and sizes have already lost
        as much as a capture costs.
        """
        return self._has_program(key) or self._lost_us.get((key.mode, key.sizes), 0) >= self.capture_us

    def observe(self, key: ProgramKey, lost_us: int) -> None:
        """Add `lost_us`, which a step with this key loses, to the sum of its mode and sizes. If the step loses nothing
        and has a program, and the sum has reached the price of a capture, set the sum back to 0.
        """
        load = key.mode, key.sizes
        if lost_us:
            self._lost_us[load] = self._lost_us.pop(load, 0) + lost_us
            if len(self._lost_us) > MAX_POSTPONED:
                self._lost_us.popitem(last=False)
        elif self._lost_us.get(load, 0) >= self.capture_us and self._has_program(key):
            self._lost_us.pop(load, None)
