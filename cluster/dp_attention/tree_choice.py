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

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cluster.dp_attention.sizes import ProgramKey, Sizes

MIN_GAIN, MIN_GAIN_TO_WAKE = 1.01, 1.03
"""A step uses another tree than the step before only if that gives more than this factor times the tokens per second,
or if the step may not use the tree of the step before. Estimates change a little after every step, and a change of the
tree may need a program that is not captured yet. `MIN_GAIN_TO_WAKE` holds while the draft rests, that is, does not read
the tokens of decoding requests: to wake it costs a step, in which it reads them.
"""
MAX_POSTPONED = 512
"""The largest number of sums that `PostponedTrees` keeps."""
OUTLOOK_UNIT = 1000
"""Outlooks (expected tokens by tier) are integers, in thousandths of a token, so that they are exact on every rank."""


class LastTree(NamedTuple):
    """The tier of the last step in which requests decoded, without steps that explored and those in which the draft
    woke, and whether the draft rested in the very last step (did not read the tokens of decoding requests).
    """

    tier: int = 0
    rests: bool = False


NO_LAST_TREE = LastTree()


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
    tokens = outlooks[0] if len(outlooks) == 1 else [sum(column) for column in zip(*outlooks, strict=True)]
    rates = [tokens[tier] / (times[tier] + prompt_us) for tier in tiers]
    best = rates.index(max(rates))
    usable: Sequence[int] = tiers
    # In most steps both the best tree and that of the step before may be used: then one of these two is chosen below.
    if may_use is not None and not (may_use(best, best) and (last.tier == best or may_use(last.tier, best))):
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
        self._lost_us: OrderedDict[tuple[int, tuple[Sizes, ...]], int] = OrderedDict()

    def may_use(self, key: ProgramKey) -> bool:
        """Whether a step may use the program of `key`: it is captured, or steps of its mode and sizes have already lost
        as much as a capture costs.
        """
        return self._has_program(key) or self.lost_us(key.mode, key.sizes) >= self.capture_us

    def lost_us(self, mode: int, sizes: tuple[Sizes, ...]) -> int:
        """Return what steps of this mode and these sizes have lost, in microseconds."""
        return self._lost_us.get((mode, sizes), 0)

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
