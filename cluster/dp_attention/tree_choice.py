"""Chooses the tree of a step: the one that is expected to give the most tokens per second (`speculative_mode:
adaptive`).

The choice is a pure function of what the ranks have gathered, so all ranks make the same one. Three things decide it:

- The costs: how long a step takes, by tier, number of decoding requests and length of their contexts. The gang measures
  them at start (`engine/tree_calibration.py`), and corrects them by the steps that it runs (`TreeTimes`).
- The outlook of each attention group: the tokens that its requests are expected to get in a step, by tier
  (`engine/tree_outlook.py`).
- The time of the prompt rows in the step, which is the same for all tiers. The longer a step takes anyway, the less a
  larger tree adds to it.

A tree also needs a program, captured for the sizes and the mode of the step. A capture takes as long as several steps,
and when the load changes, the next steps may have other sizes. So if another tree has a program for these sizes, the
step uses that tree, and `PostponedTrees` adds up what this loses. When the sum reaches the price of a capture, the
better tree is used, and captured. With the capture itself, a load has then lost about twice as much as with a choice
that knows how long the sizes last (the "ski rental problem"), if one tree stays the best.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.dp_attention.sizes import ProgramKey

MIN_GAIN, MIN_GAIN_TO_WAKE = 1.01, 1.03
"""A step uses another tree than the step before only if that gives this factor more tokens per second, or if the tree
of the step before has no program. Estimates change a little after every step, and a change of the tree may need a
program that is not captured yet. The second factor is for a draft that rests: waking it costs a step.
"""
OVERHEAD_CHANGE, CHANGE, MAX_CORRECTION = 0.02, 0.005, 1.5
"""How much one step changes the overhead, as a share of its time, and the correction of its tier; the largest
correction.
"""
LEAST_SHARE = 0.25
"""With shorter contexts than measured, a step takes at least this share of the measured time."""
SETTLING_STEPS = 12
"""The first so many steps of a tier correct only this tier."""
MAX_POSTPONED = 512
"""The largest number of sums that `PostponedTrees` keeps."""
OUTLOOK_UNIT = 1000
"""Outlooks are integers, in thousandths of a token: every rank must compute with exactly the same numbers."""


class LastTree(NamedTuple):
    """The tier of the last step in which requests decoded, and whether the draft rested in that step."""

    tier: int = 0
    rests: bool = False


NO_LAST_TREE = LastTree()


@dataclass(frozen=True)
class TreeCosts:
    """The time of a step that only decodes, in microseconds: `us[tier][i]` if each group has `counts[i]` decoding
    requests. `counts` ascend, and times do not fall with the count. `wake_us[i]` is the time of a step in which the
    draft wakes; it is empty if the draft does not rest.

    All these requests had `context` committed tokens. Each token of a request beyond that adds `token_ns[tier]`
    nanoseconds. If `token_ns` is empty, times do not depend on the context.
    """

    counts: tuple[int, ...]
    us: tuple[tuple[int, ...], ...]
    wake_us: tuple[int, ...] = ()
    context: int = 0
    token_ns: tuple[int, ...] = ()
    _cache: dict[int, list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, decodes: int, context: int = 0) -> list[float]:
        """Return the time by tier with `decodes` decoding requests: linear between the measured counts, and beyond the
        largest count extended from the last two. `context` are the committed tokens of a request, on average; 0 stands
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
        """Return the time of a step in which the draft wakes, with `decodes` decoding requests. It is 0 for a draft
        that does not rest.
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
    """A step that only decoded: its tier, the decoding requests of the largest group, its time in microseconds, and the
    context (`StepPlan.context`). A time of 0 stands for no step.
    """

    tier: int = 0
    decodes: int = 0
    us: int = 0
    context: int = 0


@dataclass(slots=True)
class _SizeTimes:
    """What the observed steps with similar numbers of requests say: a factor for the time of each tier, and the
    overhead of a step in microseconds. `settling[tier]` counts down the first steps of a tier; `first_tier` is the tier
    that was observed first.
    """

    corrections: list[float]
    settling: list[int]
    first_tier: int
    overhead_us: float = 0.0


class TreeTimes:
    """`costs`, corrected by the steps that the gang runs. All ranks observe the same steps, so they agree on all times.

    Two things are kept for each doubling of the number of decoding requests, both running medians: a correction for
    each tier (a factor), and the overhead of a step, whatever its tier. The overhead is the time of what a server does
    between two steps, and the time that a busy machine adds. It also counts for tiers that have not been used lately.

    If the first steps of a tier are slower than expected, its costs were wrong, so they only correct this tier. If they
    counted as overhead too, all other tiers would seem as much slower, and the choice would stay. The tier that is
    observed first has nothing to be compared with: its steps show the overhead from the beginning.
    """

    def __init__(self, costs: TreeCosts) -> None:
        self.costs = costs
        self._sizes: dict[int, _SizeTimes] = {}

    def of(self, decodes: int, context: int = 0) -> list[float]:
        """Return the time by tier with `decodes` decoding requests; `context` as in `TreeCosts.of`."""
        times, seen = self.costs.of(decodes, context), self._sizes.get(decodes.bit_length())
        if seen is None:
            return times
        return [us * correction + seen.overhead_us for us, correction in zip(times, seen.corrections, strict=True)]

    def observe(self, step: MeasuredStep) -> None:
        """Correct the overhead, and the time of the step's tier. Both move by fixed steps, so outliers count no more
        than other steps. The first steps of a tier have equal weights instead.
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
    """The tier of a step. If a better tree is postponed because it has no program, `lost_us` says how many microseconds
    less the tokens of this step would take with that tree. Otherwise it is 0.
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

    `times` are the costs of the tiers that are allowed (`TreeTimes.of`), `outlooks` those of all groups. `prompt_us` is
    the time of prompt rows in the step. `last` describes the step before; see `MIN_GAIN`. `may_use(tier, best)` says
    whether the step may use a tier if `best` is the best one. If it is None, or False for every tier, the step may use
    all.
    """
    tiers = range(len(times))
    rates = [sum(outlook[tier] for outlook in outlooks) / (times[tier] + prompt_us) for tier in tiers]
    best = max(tiers, key=rates.__getitem__)
    usable: Sequence[int] = tiers
    # Most steps use the tree of the step before, and this is the best one: then two questions are enough.
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
    """Adds up what steps lose because a better tree has no program yet, for each mode and sizes. All ranks have the
    same programs and see the same plans, so they agree on all sums.

    `has_program` says whether the key of a plan has a program. `capture_us` is the price of a capture in microseconds,
    on which all ranks agree too.
    """

    def __init__(self, has_program: Callable[[ProgramKey], bool]) -> None:
        self._has_program = has_program
        self.capture_us = 0
        self._lost_us: OrderedDict[tuple[object, ...], int] = OrderedDict()

    def may_use(self, key: ProgramKey) -> bool:
        """Whether a step may use this program: it is captured, or steps of its mode and sizes have lost the price of a
        capture.
        """
        return self._has_program(key) or self._lost_us.get((key.mode, key.sizes), 0) >= self.capture_us

    def observe(self, key: ProgramKey, lost_us: int) -> None:
        """Add `lost_us`, which a step with this key loses, to the sum of its mode and sizes. If the sum has reached the
        price of a capture, and a step loses nothing and has a program, set the sum back to 0.
        """
        load = key.mode, key.sizes
        if lost_us:
            self._lost_us[load] = self._lost_us.pop(load, 0) + lost_us
            if len(self._lost_us) > MAX_POSTPONED:
                self._lost_us.popitem(last=False)
        elif self._lost_us.get(load, 0) >= self.capture_us and self._has_program(key):
            self._lost_us.pop(load, None)
