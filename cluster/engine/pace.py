"""How many prompt rows may ride in a step beside requests that decode: the bargain is `prefill_share`.

A step with prompt rows may take 1 / (1 - share) times what its decoding alone takes: at 0.5 twice as long, half of it
for each side. A `Pace` foretells what a step takes, from times that were measured at start (`engine/calibrate.py`); how
far it is off by now is learned from the steps that are taken (`engine/correction.py`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

ROWS = 16  # the first point of the curve of prompt rows
MORE_DECODES, MORE_ROWS = 4, 2  # from one point of a curve to the next: times so many
STEEP = 2.0  # a curve ends where its step takes so many times its first one: from there on it is a straight line
READING = 1 / 6  # of a chunk that is not paid for at once, so that a long prefix is not read for a few rows each time
LONG = 2048  # tokens before many rows, whose own work is measured, and those of decoding requests
DEEP = 8192  # tokens before a single row, which are read: by then a processor's caches hold them no more
SHALLOW = 128  # where there is room for fewer, what they add is less than a clock's noise

Curve = tuple[tuple[int, float], ...]


class Load(NamedTuple):
    """A step to be timed. In every group `decodes` requests decode after `committed` tokens; beside them one group, or
    every one if `crowd`, takes `rows` rows of a prompt after `start` tokens of it.
    """

    decodes: int
    committed: int = 0
    rows: int = 0
    start: int = 0
    crowd: bool = False


class Limits(NamedTuple):
    """What can be measured: at most so many requests and prompt rows of a step, and tokens of one request."""

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
    """What steps take, in microseconds. `tree` is N, the target rows of a decoding request.

    `decode`: by requests that decode in each group. `token`: more per request, for each token that the longest has.
    `target`: by rows of the target in a group, one of whose requests decodes. A chunk takes `prefix` more for each
    token before it, and `pair` for each such token and row of its own. Of what rows take, the part `crowd` is done by
    all `groups` together, so that a group's rows take that much of the others' time as well.
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
        """A step in which requests with so many tokens decode, and nothing else runs."""
        return max(0.0, _at(self.decode, len(committed))) + self.token * len(committed) * max(committed, default=0)

    def bargain(self, committed: Sequence[int], busiest: float) -> Bargain:
        """What prompt rows may take beside this rank's decoding requests, where the decoding of the busiest rank takes
        `busiest`. A rank that decodes less than that has time left, but for its part in what the others' rows need.
        """
        own, crowded = self.decoding(committed), self.crowd * (self.groups - 1)
        most = max(own, busiest)
        busy = own + (most - own) * crowded / (1.0 + crowded)
        return Bargain(busy, most / (1.0 - self.share) - busy)

    def cost(self, beside: int, start: int, rows: int, others: int = 0) -> float:
        """Prompt rows `start` to `start + rows - 1` beside `beside` other rows of the target, while `others` further
        groups take prompts.
        """
        if not rows:
            return 0.0
        work = _at(self.target, beside + rows) - _at(self.target, beside)
        return work * (1.0 + self.crowd * others) + start * (self.prefix + self.pair * rows)

    def rows(self, beside: int, start: int, most: int, allowance: float, others: int = 0) -> int:
        """The most rows from `start` on, up to `most`, that take no more than `allowance`."""
        counts = range(1, most + 1)
        return bisect_right(counts, allowance, key=lambda rows: self.cost(beside, start, rows, others))

    def least(self, beside: int, start: int, most: int, others: int = 0) -> int:
        """The fewest rows, up to `most`, with which reading the tokens before them is at most a part `READING` of what
        they take.
        """
        counts, needed = range(1, most), start * self.prefix / READING
        return 1 + bisect_left(counts, needed, key=lambda rows: self.cost(beside, start, rows, others))

    def described(self) -> dict[str, Any]:
        """The measured costs, JSON-ready, in milliseconds."""
        return {
            "decode_ms": {str(requests): us / 1000 for requests, us in self.decode},
            "decode_ms_per_1000_tokens": self.token,
            "target_rows_ms": {str(rows): us / 1000 for rows, us in self.target},
            "prompt_prefix_ms_per_1000_tokens": self.prefix,
            "prompt_row_ms_per_1000_tokens": self.pair,
            "crowd": self.crowd,
        }


def fit(time: Callable[[Load], float], limits: Limits, share: float, tree: int, groups: int) -> Pace:
    """The pace of a gang of `groups`, of a few steps that `time` times, in microseconds."""
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
    """The curve between its points, and straight on beyond the first and the last."""
    if len(curve) == 1:
        return curve[0][1]
    right = min(max(1, bisect_left(curve, at, key=lambda point: point[0])), len(curve) - 1)
    (low, before), (high, after) = curve[right - 1], curve[right]
    return before + (after - before) * (at - low) / (high - low)
