"""Predicts step times, which decide how many prompt rows join decoding requests, and which waits are expected.

A step with prompt rows may take 1 / (1 - share) times the time of its decoding alone: with share 0.5 twice the time,
one half for decoding and one half for prompts. `engine/calibrate.py` measures a few steps at start and fits a
`StepTimes`, which other modules call the pace.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from cluster.status import StepCosts

READING = 1 / 6  # largest share of a chunk's cost that reads its prefix: no long prefix is read for a few rows

Curve = tuple[tuple[int, float], ...]
"""Points (size, microseconds) in order of size."""


class PrefillBudget(NamedTuple):
    """Microseconds of a step. `busy`: this rank's decoding, and its idle time that goes to other groups' rows.
    `allowance`: the time for this rank's prompt rows.
    """

    busy: float
    allowance: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Predicts step times in microseconds. `share` is the prompts' share of a step, `tree` is N, the target rows of a
    decoding request, and `groups` is the number of attention groups.

    `decode` gives the time by the number of decoding requests per group; each request adds `token` for each token of
    the longest request. `target` gives the time by target rows in a group with one decoding request. A chunk adds
    `prefix` for each token before it, and `pair` for each pair of a token before it and a row of its own. All groups
    together do the share `crowd` of the work for rows, so a group's rows cost each other group that share of their time
    too.
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
        """Return the step times of reported `costs`. (Microseconds per token are milliseconds per 1000 tokens.)"""
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
        return max(0.0, _at(self.target, 0))

    def decoding(self, committed: Sequence[int]) -> float:
        """Return the time of a step that only decodes; `committed` has the number of tokens of each request."""
        # Each of the n requests is charged for the longest one's tokens: decode(n) + token * n * max(committed).
        return max(0.0, _at(self.decode, len(committed))) + self.token * len(committed) * max(committed, default=0)

    def prefill_budget(self, committed: Sequence[int], busiest: float) -> PrefillBudget:
        """Return the times of a step for this rank's decoding and for its prompt rows, if decoding takes `busiest` on
        the busiest other rank. A rank with less decoding than that is idle meanwhile, except for its part in the work
        for others' rows.
        """
        own, crowded = self.decoding(committed), self.crowd * (self.groups - 1)
        # most: decoding time of the step. Of the idle time most - own, the share c / (1 + c), with
        # c = crowd * (groups - 1), goes to work for other groups' rows and counts as busy.
        most = max(own, busiest)
        busy = own + (most - own) * crowded / (1.0 + crowded)
        return PrefillBudget(busy, most / (1.0 - self.share) - busy)

    def cost(self, beside: int, start: int, rows: int, others: int = 0) -> float:
        """Return the time of `rows` prompt rows after `start` tokens, beside `beside` other target rows, while `others`
        other groups run prompt rows too.
        """
        if not rows:
            return 0.0
        work = _at(self.target, beside + rows) - _at(self.target, beside)
        return work * (1.0 + self.crowd * others) + start * (self.prefix + self.pair * rows)

    def rows(self, beside: int, start: int, most: int, allowance: float, others: int = 0) -> int:
        """Return the largest number of rows from `start` on, up to `most`, that costs no more than `allowance`."""
        counts = range(1, most + 1)
        return bisect_right(counts, allowance, key=lambda rows: self.cost(beside, start, rows, others))

    def least(self, beside: int, start: int, most: int, others: int = 0) -> int:
        """Return the fewest rows, up to `most`, for which reading the prefix is at most `READING` of their cost."""
        counts, needed = range(1, most), start * self.prefix / READING
        return 1 + bisect_left(counts, needed, key=lambda rows: self.cost(beside, start, rows, others))

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
    return tuple(sorted((int(at), 1000 * value) for at, value in ms.items()))


def _at(curve: Curve, at: int) -> float:
    """Return the value of a curve at `at`: linear between its points, and extrapolated beyond both ends."""
    if len(curve) == 1:
        return curve[0][1]
    right = min(max(1, bisect_left(curve, at, key=lambda point: point[0])), len(curve) - 1)
    (low, before), (high, after) = curve[right - 1], curve[right]
    return before + (after - before) * (at - low) / (high - low)
