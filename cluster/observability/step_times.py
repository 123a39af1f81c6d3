"""Predicts step times. They decide how many prompt rows join decoding requests, and which waits are expected.

A step with decoding requests and prompt rows may take 1 / (1 - share) times the time of its decoding alone. With share
0.5 this is twice the time: one half for decoding and one half for prompts. `engine/calibrate.py` measures a few steps
at start and fits a `StepTimes` to them, which some modules call the pace.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from cluster.status import StepCosts

# The largest share of a chunk's cost that reading its prefix may take: a long prefix must not be read for a few rows
# only.
MAX_PREFIX_READ_SHARE = 1 / 6

Curve = tuple[tuple[int, float], ...]
"""Points (size, microseconds) in order of size."""


class PrefillBudget(NamedTuple):
    """The parts of a step's time, in microseconds. `busy` is the time of this rank's decoding, plus the time in which
    this rank, while it waits for slower ranks, works for the rows of other attention groups. `allowance` is the time
    for this rank's prompt rows.
    """

    busy: float
    allowance: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Predicts step times in microseconds. `share` is the prompts' share of a step, `tree` is N, the target rows of a
    decoding request, and `groups` is the number of attention groups.

    `decode` gives the time by the number of decoding requests per group; each request adds `token` for each token of
    the longest request. `target` gives the time by the number of target rows in a group with one decoding request. A
    chunk of prompt rows adds `prefix` for each token before it, and `pair` for each pair of a token before it and one
    of its rows. A part of the work for prompt rows is done by all groups together. So if the prompt rows of one group
    take the time t, they also take `crowd` times t of every other group.
    """

    share: float
    tree: int
    decode: Curve
    token: float
    target: Curve
    prefix: float
    pair: float
    crowd: float = 0.0
    groups: int = 1

    @classmethod
    def from_costs(cls, costs: StepCosts, share: float, tree: int, groups: int) -> Self:
        """Return the step times of reported `costs`. Microseconds per token and milliseconds per 1000 tokens are the
        same number.
        """
        return cls(
            share=share,
            tree=tree,
            decode=_curve(costs.decode_ms),
            token=costs.decode_ms_per_1000_tokens,
            target=_curve(costs.target_rows_ms),
            prefix=costs.prompt_prefix_ms_per_1000_tokens,
            pair=costs.prompt_row_ms_per_1000_tokens,
            crowd=costs.crowd,
            groups=groups,
        )

    @property
    def fixed(self) -> float:
        """The time of a step without target rows: `target` extrapolated to 0 rows."""
        return max(0.0, _interpolate(self.target, 0))

    def decoding(self, committed: Sequence[int]) -> float:
        """Return the time of a step that only decodes; `committed` has the number of tokens of each request."""
        # Each of the n requests is charged for the longest one's tokens: decode(n) + token * n * max(committed).
        return max(0.0, _interpolate(self.decode, len(committed))) + self.token * len(committed) * max(
            committed, default=0
        )

    def prefill_budget(self, committed: Sequence[int], busiest_us: float) -> PrefillBudget:
        """Return how the time of a step is divided between this rank's decoding and its prompt rows. `committed` is as
        in `decoding`. `busiest_us` is the time of decoding on the busiest other rank. A rank that decodes for less time
        than that is idle for the rest, except that it works for the rows of other groups.
        """
        own_us, shared_share = self.decoding(committed), self.crowd * (self.groups - 1)
        # The idle time is decode_us - own_us. Its share c / (1 + c), with c = crowd * (groups - 1), goes to work for
        # other groups' rows and counts as busy.
        decode_us = max(own_us, busiest_us)
        busy_us = own_us + (decode_us - own_us) * shared_share / (1.0 + shared_share)
        return PrefillBudget(busy_us, decode_us / (1.0 - self.share) - busy_us)

    def cost(self, other_rows: int, start: int, rows: int, other_groups: int = 0) -> float:
        """Return the predicted microseconds that `rows` prompt rows add to a step. `start` tokens of their prompt come
        before them. The group's step also has `other_rows` other target rows. `other_groups` other groups run prompt
        rows in the step.
        """
        if not rows:
            return 0.0
        work = _interpolate(self.target, other_rows + rows) - _interpolate(self.target, other_rows)
        return work * (1.0 + self.crowd * other_groups) + start * (self.prefix + self.pair * rows)

    def max_rows(self, other_rows: int, start: int, limit: int, allowance: float, other_groups: int = 0) -> int:
        """Return the largest number of rows, from 0 to `limit`, that costs no more than `allowance`. The other
        arguments are as in `cost`.
        """
        counts = range(1, limit + 1)
        return bisect_right(counts, allowance, key=lambda rows: self.cost(other_rows, start, rows, other_groups))

    def min_rows(self, other_rows: int, start: int, limit: int, other_groups: int = 0) -> int:
        """Return the smallest number of rows, from 1 to `limit`, for which reading the prefix is at most
        `MAX_PREFIX_READ_SHARE` of their cost. If no number up to `limit` is enough, return `limit`. The other arguments
        are as in `cost`.
        """
        counts, needed_us = range(1, limit), start * self.prefix / MAX_PREFIX_READ_SHARE
        return 1 + bisect_left(counts, needed_us, key=lambda rows: self.cost(other_rows, start, rows, other_groups))

    def costs(self) -> StepCosts:
        """Return the measured costs in the form that a rank reports, in milliseconds."""
        return StepCosts(
            decode_ms={str(requests): us / 1000 for requests, us in self.decode},
            decode_ms_per_1000_tokens=self.token,
            target_rows_ms={str(rows): us / 1000 for rows, us in self.target},
            prompt_prefix_ms_per_1000_tokens=self.prefix,
            prompt_row_ms_per_1000_tokens=self.pair,
            crowd=self.crowd,
        )


def _curve(ms: Mapping[str, float]) -> Curve:
    return tuple(sorted((int(size), 1000 * value) for size, value in ms.items()))


def _interpolate(curve: Curve, size: int) -> float:
    """Return the value of a curve at `size`: linear between its points, and extrapolated beyond both ends."""
    if len(curve) == 1:
        return curve[0][1]
    right = min(max(1, bisect_left(curve, size, key=lambda point: point[0])), len(curve) - 1)
    (low, before), (high, after) = curve[right - 1], curve[right]
    return before + (after - before) * (size - low) / (high - low)
