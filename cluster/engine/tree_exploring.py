"""Explores: now and then uses a tree that does not seem to be the best, for a few steps. There are two reasons.

- A deeper tree than the best one: how many tokens it gives is seen only when it runs. This is how trees come back when
  text becomes predictable.
- A rival of the tree in use: a tree that would be better if its time were as wrong as it may well be
  (`TreeTimes.errors`). What was measured at start is inexact, above all on a machine that runs other programs. If a
  rival runs shortly before or after the tree in use, the times of both can be compared (`TreeTimes`).

Exploring may take a small share of the time. Where steps are captured, this includes the capture of the explored tree.
A tier is the number of a tree shape that steps may use.
"""

from collections.abc import Callable, Sequence

from cluster.config.tree_shape import TreeShape
from cluster.dp_attention.facts import NO_TIER, TreeVote
from cluster.dp_attention.tree_choice import OUTLOOK_UNIT
from cluster.dp_attention.tree_times import MeasuredStep, TreeTimes

EXPLORED_SHARE = 0.005
"""The share of the time that may go into exploring."""
EXPLORED_STEPS = 6
"""An exploration lasts this many steps, and one more if the draft has to wake before it: a draft that has skipped the
tokens of steps without trees needs a step to read them, which would not pay for a single tree.
"""
PAUSE_STEPS = 12
"""At least this many steps lie between two explorations, or between a change of the requests and an exploration. In
these steps the times of the tree in use are compared again, and the plan may choose what was explored.
"""
MAX_SAVED = 2.0
"""At most the price of this many explorations is saved. If explorations have cost more than was saved, the debt is
limited in the same way.
"""
MAX_CHARGE = 5.0
"""An explored step costs at most this many times the expected time of its tier, and the time of a capture. A step that
stalls for seconds says nothing about trees.
"""
CREDIT_STEPS, RELEASED_SHARE = 20, 0.02
"""When a number of requests (rounded to a power of two) occurs for the first time, a credit begins: exploring rivals
may cost the time of `CREDIT_STEPS` steps without trees, besides what is saved. Each step releases `RELEASED_SHARE` of
its time from the credit, until nothing is left. The groups of a gang share the credit.
"""
HOPED_ERRORS, HOPED_GAIN = 1.5, 1.02
"""A rival is a tree that gives more than `HOPED_GAIN` times the tokens per second of the tree in use, if it is better
than expected by `HOPED_ERRORS` standard deviations of its error.
"""
LEAST_LOSS = 0.01
"""A step with a rival is counted as losing at least this share of its time, even if the rival seems as good. Otherwise
explorations would be free, and would never stop.
"""


class TreeExploring:
    """Decides when the rank explores which tier, and counts the time that it may still spend on this."""

    def __init__(
        self,
        tiers: Sequence[TreeShape],
        times: TreeTimes,
        groups: int = 1,
        capture_us: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """The `groups` attention groups share the time for exploring. `capture_us(tier)` is the time of a capture in
        microseconds if the next step with this tier would have to capture its program, otherwise 0.
        """
        self._capture_us_of = capture_us
        self._times, self._groups = times, groups
        # By best tier: exploring goes about twice as deep, because deeper levels can pay only if these do.
        depths = [shape.drafted_shape.num_steps for shape in tiers]
        drafted_depths = [shape.num_steps for shape in tiers if not shape.lookup_tokens]
        self._deeper = [max(t for t, d in enumerate(drafted_depths) if d <= 2 * depth + 1) for depth in depths]
        self._credits_us: dict[int, float] = {}  # what is left of `CREDIT_STEPS`, by bits of the number of requests
        self._saved_us = self._released_us = 0.0  # what may go into all explorations, and into rivals alone
        self._usual_us = 0.0  # the time of steps that did not explore, of which no share is saved yet
        self._tier, self._is_rival, self._price_us, self._prefers_deeper = NO_TIER, False, 0.0, False
        self._capture_us = 0  # the part of `_price_us` that is for a capture
        self._steps_left = 0  # of the exploration that runs
        self._pause = 0  # steps until the next exploration may begin
        self._used_tier = 0  # of the last step that did not explore
        self._gang_decodes = 0  # of the group that has most, in the last step

    @property
    def is_exploring(self) -> bool:
        """Whether the next step may be one of an exploration that runs."""
        return self._steps_left > 0

    def choose(self, decodes: int, context: int, outlook: Sequence[int], max_tier: int) -> None:
        """Choose which tier is explored next, and compute what this is expected to cost. The expected tokens of the
        group's `decodes` requests with this `context` are `outlook`. Steps use no tier beyond `max_tier`.
        """
        if self._steps_left:
            return
        decodes = self._decodes(decodes)
        used, times = min(self._used_tier, max_tier), self._times.of(decodes, context)[: max_tier + 1]
        errors = self._times.errors(decodes, context, used)
        rates = [value / us for value, us in zip(outlook, times, strict=False)]
        best = max(range(len(rates)), key=rates.__getitem__)
        hopes = [rate * (1 + HOPED_ERRORS * error) for rate, error in zip(rates, errors, strict=False)]
        rival = max((tier for tier in range(len(rates)) if tier != used), key=hopes.__getitem__, default=used)
        has_rival, deeper = rival != used and hopes[rival] > HOPED_GAIN * rates[used], min(self._deeper[best], max_tier)
        # The rival gives about the tokens that are expected of it. A deeper tree may give none.
        rival_loss_us = LEAST_LOSS * times[rival]
        if has_rival:
            rival_loss_us = max(rival_loss_us, times[rival] - outlook[rival] / rates[best])
        rival_price_us = self._capture_us_of(rival) + self._waking_us(rival, decodes) + EXPLORED_STEPS * rival_loss_us
        deeper_loss_us = max(1.0, times[deeper] - times[0])
        deeper_price_us = self._capture_us_of(deeper) + self._waking_us(deeper, decodes)
        deeper_price_us += EXPLORED_STEPS * deeper_loss_us
        self._credits_us.setdefault(decodes.bit_length(), CREDIT_STEPS * times[0] / self._groups)
        self._save(decodes)
        # While it is the turn of a deeper tree, a rival can be paid for only by what the credit has released.
        is_deeper_due = self._prefers_deeper and (
            self._saved_us >= deeper_price_us or self._released_us < rival_price_us
        )
        self._is_rival = has_rival and not (deeper > best and is_deeper_due)
        if self._is_rival:
            self._tier, self._price_us = rival, rival_price_us
        else:
            self._tier, self._price_us = deeper if deeper > best else NO_TIER, deeper_price_us
        self._capture_us = 0 if self._tier == NO_TIER else self._capture_us_of(self._tier)

    def stop(self) -> None:
        """The requests have changed: end the exploration that runs, if one does, and pause. Steps of other sizes may
        need programs of their own, and exploring would capture more of them.
        """
        self._steps_left, self._pause = 0, PAUSE_STEPS

    def next_tier(self, decodes: int, max_tier: int) -> int:
        """Return the tier that a step explores in which the group decodes `decodes` requests, or `NO_TIER`."""
        tier = min(self._tier, max_tier)
        can_begin = not self._steps_left and not self._pause and tier not in (NO_TIER, self._used_tier)
        is_paid = self._saved_us + self._released_us * self._is_rival >= self._price_us
        # The requests of another group may have changed since `choose`. The steps then have other sizes, and the tier
        # may have no program for these sizes: `_price_us` would be too low.
        if can_begin and is_paid and self._capture_us_of(tier) <= self._capture_us:
            self._prefers_deeper = self._is_rival
            wakes_before = tier > 0 and self._waking_us(tier, self._decodes(decodes)) > 0
            self._steps_left, self._pause = EXPLORED_STEPS + wakes_before, PAUSE_STEPS
        if not self._steps_left:
            return NO_TIER
        self._steps_left -= 1
        return tier

    def observe(self, vote: TreeVote, step: MeasuredStep, tokens: int) -> None:
        """Count what a step has saved or cost. `vote` was this rank's vote for the step, in which the requests of the
        group got `tokens` tokens in all.

        Each step that does not explore saves a share of its time. A step that explores costs its time, less what usual
        steps take for the same tokens, and less the time of its prompt rows.
        """
        self._gang_decodes = step.decodes
        elapsed_us = step.us + step.overhead_us
        if vote.explores == NO_TIER:
            self._used_tier = step.tier
            self._usual_us += elapsed_us
            self._pause = max(0, self._pause - 1)
            return
        if step.tier == min(vote.explores, vote.max_tier) or (step.tier == self._used_tier == 0):
            times = self._times.of(step.decodes, step.context)[: vote.max_tier + 1]
            best_rate = max(value / us for value, us in zip(vote.outlook, times, strict=False))
            own_us = min(elapsed_us - vote.prompt_us, MAX_CHARGE * times[step.tier] + self._capture_us)
            cost_us = own_us - OUTLOOK_UNIT * tokens / best_rate
            if not step.tier and self._used_tier and not self._steps_left:
                cost_us += self._times.costs.waking(step.decodes)  # the draft has rested, and wakes in the next step
            paid_us = min(cost_us, self._released_us) if self._is_rival and cost_us > 0 else 0.0
            self._released_us -= paid_us
            self._saved_us -= cost_us - paid_us
        else:
            self._steps_left = 0  # the step had to use another tier
        self._limit_savings()

    def _save(self, decodes: int) -> None:
        """Save the share of the time of the last steps that did not explore, and release that of the credit."""
        usual_us, self._usual_us = self._usual_us / self._groups, 0.0
        self._saved_us += EXPLORED_SHARE * usual_us
        self._limit_savings()
        released_us = min(self._credits_us[decodes.bit_length()], RELEASED_SHARE * usual_us)
        self._credits_us[decodes.bit_length()] -= released_us
        self._released_us += released_us

    def _limit_savings(self) -> None:
        limit_us = MAX_SAVED * self._price_us
        self._saved_us = max(-limit_us, min(limit_us, self._saved_us))

    def _decodes(self, own_decodes: int) -> int:
        """Return the number of requests of the group that has most: steps take as long as that group takes."""
        return own_decodes if self._groups == 1 else max(own_decodes, self._gang_decodes)

    def _waking_us(self, tier: int, decodes: int) -> float:
        """Return the time in which the draft wakes because `tier` is explored: before the exploration, or after it."""
        return self._times.costs.waking(decodes) if bool(tier) != bool(self._used_tier) else 0.0
