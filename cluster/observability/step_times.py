"""Predicted times of steps, of which the number of prompt rows beside decoding requests and expected waits follow.

A step with prompt rows may take 1 / (1 - share) times as long as its decoding alone: at 0.5 twice as long, half of it
for each side. A `StepTimes` predicts the times of steps from a few that were measured at start (`engine/calibrate.py`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from cluster.status import StepCosts

READING = 1 / 6  # most of a chunk's cost that reading its prefix may be: a long prefix is not read for a few rows

Curve = tuple[tuple[int, float], ...]


class PrefillBudget(NamedTuple):
    """Of a step, in microseconds: how long this rank is busy with decoding requests (`busy`), and what its prompt rows
    may take besides (`allowance`).
    """

    busy: float
    allowance: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Predicted times of steps, in microseconds. `tree` is N, the target rows of a decoding request.

    `decode` is the time by decoding requests in each group; every request adds `token` for each token of the longest
    one. `target` is the time by target rows in a group with one decoding request; a chunk adds `prefix` for each token
    before it, and `pair` for each such token and each of its own rows. All `groups` together
    do the share `crowd` of the work for rows, so a group's rows take that much of the others' time as well.
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
    def reported(cls, costs: StepCosts, share: float, tree: int, groups: int) -> Self:
        """The pace that a rank reported as `costs`; see the class for `share`, `tree` and `groups`."""
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
        """The time of a step before its first target row."""
        return max(0.0, _at(self.target, 0))

    def decoding(self, committed: Sequence[int]) -> float:
        """The time of a step in which requests with so many tokens decode, and nothing else runs."""
        return max(0.0, _at(self.decode, len(committed))) + self.token * len(committed) * max(committed, default=0)

    def prefill_budget(self, committed: Sequence[int], busiest: float) -> PrefillBudget:
        """The time that prompt rows may take beside this rank's decoding requests, if the decoding of the busiest other
        rank takes `busiest`. A rank that decodes less has time left, less its part in the work for the others' rows.
        """
        own, crowded = self.decoding(committed), self.crowd * (self.groups - 1)
        most = max(own, busiest)
        busy = own + (most - own) * crowded / (1.0 + crowded)
        return PrefillBudget(busy, most / (1.0 - self.share) - busy)

    def cost(self, beside: int, start: int, rows: int, others: int = 0) -> float:
        """The time of prompt rows `start` to `start + rows - 1` beside `beside` other target rows, while `others` other
        groups run prompt rows as well.
        """
        if not rows:
            return 0.0
        work = _at(self.target, beside + rows) - _at(self.target, beside)
        return work * (1.0 + self.crowd * others) + start * (self.prefix + self.pair * rows)

    def rows(self, beside: int, start: int, most: int, allowance: float, others: int = 0) -> int:
        """The largest number of rows from `start` on, up to `most`, that costs no more than `allowance`."""
        counts = range(1, most + 1)
        return bisect_right(counts, allowance, key=lambda rows: self.cost(beside, start, rows, others))

    def least(self, beside: int, start: int, most: int, others: int = 0) -> int:
        """The fewest rows, up to `most`, for which reading their prefix is at most a share `READING` of their cost."""
        counts, needed = range(1, most), start * self.prefix / READING
        return 1 + bisect_left(counts, needed, key=lambda rows: self.cost(beside, start, rows, others))

    def costs(self) -> StepCosts:
        """The measured costs as they are reported."""
        return StepCosts(
            decode_ms={str(requests): us / 1000 for requests, us in self.decode},
            decode_ms_per_1000_tokens=self.token,
            target_rows_ms={str(rows): us / 1000 for rows, us in self.target},
            prompt_prefix_ms_per_1000_tokens=self.prefix,
            prompt_row_ms_per_1000_tokens=self.pair,
            crowd=self.crowd,
        )


def _curve(ms: Mapping[str, float]) -> Curve:
    return tuple(sorted((int(at), 1000 * value) for at, value in ms.items()))


def _at(curve: Curve, at: int) -> float:
    """The curve at `at`: linear between its points, and extrapolated beyond the first and the last."""
    if len(curve) == 1:
        return curve[0][1]
    right = min(max(1, bisect_left(curve, at, key=lambda point: point[0])), len(curve) - 1)
    (low, before), (high, after) = curve[right - 1], curve[right]
    return before + (after - before) * (at - low) / (high - low)
