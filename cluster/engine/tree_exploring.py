"""Explores: now and then uses a tree that does not seem to be the best, for a few steps. There are two reasons.

- A deeper tree than the best one: how many tokens it gives is seen only when it runs. This is how trees come back when
  text becomes predictable.
- A rival of the tree in use: a tree that would be better if its time were as wrong as it may be (`TreeTimes.errors`).
  What was measured at start is inexact, above all on a machine that runs other programs. If a rival runs shortly before
  or after the tree in use, the times of both can be compared (`TreeTimes`).

Exploring may take a small share of the time. A tier is the number of a tree shape that steps may use.
"""

from collections.abc import Sequence

from cluster.config.tree_shape import TreeShape
from cluster.dp_attention.facts import NO_TIER, TreeVote
from cluster.dp_attention.tree_choice import OUTLOOK_UNIT
from cluster.dp_attention.tree_times import MeasuredStep, TreeTimes

EXPLORED_SHARE = 0.005
"""The share of the time that may go into exploring."""
EXPLORED_STEPS = 6
"""An exploration lasts this many steps. A draft that has skipped the tokens of steps without trees needs a step
to read them, which would not pay for a single tree.
"""
MAX_SAVED = 2.0
"""The time saved for exploring is at most the price of this many explorations."""
CREDIT_STEPS = 30
"""For each doubling of the number of requests, exploring rivals may take the time of this many steps at once, besides
what is saved.
"""
LEAST_LOSS = 0.01
"""A step with a rival is expected to lose at least this share of its time, so that explorations stay rare."""


class TreeExploring:
    """Decides when the rank explores which tier, and counts the time that it may still spend on this."""

    def __init__(self, tiers: Sequence[TreeShape], times: TreeTimes, groups: int = 1) -> None:
        """The `groups` attention groups share the time for exploring."""
        self._times, self._share = times, EXPLORED_SHARE / groups
        # By best tier: exploring goes about twice as deep, because deeper levels can pay only if these do.
        depths = [shape.drafted_shape.num_steps for shape in tiers]
        drafted_depths = [shape.num_steps for shape in tiers if not shape.lookup_tokens]
        self._deeper = [max(t for t, d in enumerate(drafted_depths) if d <= 2 * depth + 1) for depth in depths]
        self._credits_us: dict[int, float] = {}  # what is left of `CREDIT_STEPS`, by bits of the number of requests
        self._saved_us = 0.0
        self._tier, self._is_rival, self._price_us = NO_TIER, False, 0.0
        self._prefers_deeper, self._last_tier = False, 0  # the tier in use
        self._steps_left = 0  # of the exploration that runs

    def choose(self, decodes: int, context: int, outlook: Sequence[int], max_tier: int) -> None:
        """Choose which tier is explored next, and compute the most time that this costs. The expected tokens of
        `decodes` requests with this `context` are `outlook`.
        """
        times, used = self._times.of(decodes, context), self._last_tier
        credit_us = self._credits_us.setdefault(decodes.bit_length(), CREDIT_STEPS * times[0])
        if self._steps_left:
            return
        rates = [value / us for value, us in zip(outlook, times, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        hopes = [rate * (1 + error) for rate, error in zip(rates, self._times.errors(decodes), strict=True)]
        rival = max((tier for tier in range(max_tier + 1) if tier != used), key=hopes.__getitem__, default=used)
        has_rival, deeper = rival != used and hopes[rival] > rates[used], min(self._deeper[best], max_tier)
        # The rival gives about the tokens that are expected of it. A deeper tree may give none.
        rival_loss_us = max(LEAST_LOSS * times[rival], times[rival] - outlook[rival] / rates[best])
        rival_price_us = self._waking_us(rival, decodes) + EXPLORED_STEPS * rival_loss_us
        prefers_rival = credit_us >= rival_price_us or not self._prefers_deeper
        self._is_rival = has_rival and (prefers_rival or deeper <= best)
        if self._is_rival:
            self._tier, self._price_us = rival, rival_price_us
        elif deeper > best:
            self._tier = deeper
            extra_us = max(1.0, times[deeper] - times[0])
            self._price_us = self._waking_us(deeper, decodes) + EXPLORED_STEPS * extra_us
        else:
            self._tier = NO_TIER

    def next_tier(self, decodes: int, max_tier: int) -> int:
        """Return the tier that a step of `decodes` requests explores, or `NO_TIER`."""
        tier = min(self._tier, max_tier)
        explores = self._steps_left > 0 or (tier not in (NO_TIER, self._last_tier) and self._begin(decodes))
        self._steps_left = self._steps_left - 1 if explores else 0
        return tier if explores else NO_TIER

    def _begin(self, decodes: int) -> bool:
        """Begin an exploration if there is enough time for it, and return whether there is."""
        size = decodes.bit_length()
        credit_us = self._credits_us.get(size, 0.0) if self._is_rival else 0.0
        if self._saved_us + credit_us < self._price_us:
            return False
        used_us = min(credit_us, self._price_us)
        if used_us:
            self._credits_us[size] -= used_us
        self._saved_us += used_us
        if not self._tier:  # if the draft wakes after the exploration, the step in which it does is not charged
            self._saved_us -= self._waking_us(0, decodes)
        self._prefers_deeper = self._is_rival
        self._steps_left = EXPLORED_STEPS + 1  # the first may only wake the draft, without a tree
        return True

    def _waking_us(self, tier: int, decodes: int) -> float:
        """Return the time in which the draft wakes because `tier` is explored: before the exploration, or after it."""
        return self._times.costs.waking(decodes) if bool(tier) != bool(self._last_tier) else 0.0

    def observe(self, vote: TreeVote, step: MeasuredStep, decodes: int, tokens: int) -> None:
        """Count what a step has saved or cost. `vote` was this rank's vote for the step, in which `decodes` requests of
        the rank got `tokens` tokens.

        Each step that does not explore saves a share of its time. A step that explores costs its time, less what usual
        steps take for the same tokens, and less the time of its prompt rows. If an exploration costs nothing in all,
        the saved time still suffices, and the next exploration follows at once.
        """
        elapsed_us, self._last_tier = step.us + step.overhead_us, step.tier
        if vote.explores == NO_TIER:
            self._saved_us += self._share * elapsed_us
        else:
            times = self._times.of(decodes, step.context)
            best_rate = max(value / us for value, us in zip(vote.outlook, times, strict=True))
            self._saved_us += OUTLOOK_UNIT * tokens / best_rate + vote.prompt_us - elapsed_us
        self._saved_us = min(self._saved_us, MAX_SAVED * self._price_us)
