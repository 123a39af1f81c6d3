"""How many prompt rows may run in a step beside decoding requests, as `prefill_share` sets it.

A step with prompt rows may take 1 / (1 - share) times as long as its decoding alone: at 0.5 twice as long, half of it
for each side. A `Pace` predicts the times of steps from a few that were measured at start (`engine/calibrate.py`); how
far its predictions are off by now is learned from the steps that are taken (`engine/pace_correction.py`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from cluster.status import StepCosts

ROWS = 16  # the first point of the curve of prompt rows
MORE_DECODES, MORE_ROWS = 4, 2  # factors from one point of a curve to the next
STEEP = 2.0  # a curve ends at so many times the time of its first step; beyond that it is extrapolated
READING = 1 / 6  # most of a chunk's cost that reading its prefix may be: a long prefix is not read for a few rows
LONG = 2048  # length with which attention's own work is measured, of decoding requests and of many prompt rows
DEEP = 8192  # length of the prefix with which reading it is measured, by a single row: no processor caches so much
SHALLOW = 128  # shorter prefixes are not measured: what they add is less than the clock's noise

Curve = tuple[tuple[int, float], ...]


class Load(NamedTuple):
    """A step to be timed. In every group `decodes` requests decode, with `committed` tokens each; besides, one group,
    or every group if `crowd`, runs `rows` prompt rows that follow `start` tokens.
    """

    decodes: int
    committed: int = 0
    rows: int = 0
    start: int = 0
    crowd: bool = False


class Limits(NamedTuple):
    """The largest step that can be measured: decoding requests, prompt rows, and tokens of one request."""

    decodes: int
    rows: int
    tokens: int


class Bargain(NamedTuple):
    """Of a step, in microseconds: how long this rank is busy with decoding requests (`busy`), and what its prompt rows
    may take besides (`allowance`).
    """

    busy: float
    allowance: float


@dataclass(frozen=True, slots=True)
class Pace:
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

    def decoding(self, committed: Sequence[int]) -> float:
        """The time of a step in which requests with so many tokens decode, and nothing else runs."""
        return max(0.0, _at(self.decode, len(committed))) + self.token * len(committed) * max(committed, default=0)

    def bargain(self, committed: Sequence[int], busiest: float) -> Bargain:
        """The time that prompt rows may take beside this rank's decoding requests, if the decoding of the busiest other
        rank takes `busiest`. A rank that decodes less has time left, less its part in the work for the others' rows.
        """
        own, crowded = self.decoding(committed), self.crowd * (self.groups - 1)
        most = max(own, busiest)
        busy = own + (most - own) * crowded / (1.0 + crowded)
        return Bargain(busy, most / (1.0 - self.share) - busy)

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


def fit(time: Callable[[Load], float], limits: Limits, share: float, tree: int, groups: int) -> Pace:
    """The pace of a gang of `groups`, fitted to a few steps; `time` measures a step, in microseconds."""
    alone = time(Load(1))
    decode = [(1, alone)]
    while decode[-1][0] < limits.decodes and decode[-1][1] < STEEP * alone:
        more = min(decode[-1][0] * MORE_DECODES, limits.decodes)
        decode.append((more, time(Load(more))))
    few = min(ROWS, limits.rows)
    target = [(tree, alone), (tree + few, time(Load(1, rows=few)))]
    rows = few
    while rows < limits.rows and (target[-1][1] < STEEP * alone or len(target) == 2):
        rows = min(rows * MORE_ROWS, limits.rows)
        target.append((tree + rows, time(Load(1, rows=rows))))
    last = target[-1][1]

    crowd = 0.0
    if groups > 1 and last > alone:
        together = time(Load(1, rows=rows, crowd=True))
        crowd = min(1.0, max(0.0, (together - last) / (last - alone) / (groups - 1)))
    long, deep = min(LONG, limits.tokens - rows), min(DEEP, limits.tokens - rows)
    token = prefix = pair = 0.0
    if deep >= SHALLOW:
        readers, usual = decode[min(1, len(decode) - 1)]
        token = max(0.0, time(Load(readers, long)) - usual) / (readers * long)
        more_one = max(0.0, time(Load(1, rows=1, start=deep)) - time(Load(1, rows=1))) / deep
        more_rows = max(more_one, (time(Load(1, rows=rows, start=long)) - last) / long)
        pair = (more_rows - more_one) / (rows - 1) if rows > 1 else more_one
        prefix = max(0.0, more_one - pair)
    return Pace(share, tree, _rising(decode), token, _rising(target), prefix, pair, crowd, groups)


def _rising(points: Sequence[tuple[int, float]]) -> Curve:
    """The same points, none below the one before: less work never takes longer."""
    times = accumulate((us for _, us in points), max)
    return tuple((at, us) for (at, _), us in zip(points, times, strict=True))


def _at(curve: Curve, at: int) -> float:
    """The curve at `at`: linear between its points, and extrapolated beyond the first and the last."""
    if len(curve) == 1:
        return curve[0][1]
    right = min(max(1, bisect_left(curve, at, key=lambda point: point[0])), len(curve) - 1)
    (low, before), (high, after) = curve[right - 1], curve[right]
    return before + (after - before) * (at - low) / (high - low)
