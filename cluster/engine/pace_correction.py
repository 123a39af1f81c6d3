"""How far the predictions of the pace measured at start are off by now, learned from the steps that are taken.

Only the number of prompt rows that run beside decoding requests depends on it, never which tokens come out.
"""

from dataclasses import dataclass, field
from math import inf, sqrt

QUICK, SLOW = 0.2, 0.02  # the part by which a figure moves with its first step, and at least with each later one
MOST = 3.0  # times that rows may seem dearer or cheaper than at start: a machine busy for a while starves no prompt
TELLING = 1 / 20  # prompt rows tell something where they take at least this part of what decoding takes


@dataclass(slots=True)
class RunningMedian:
    """The median of what is seen, between `least` and `most`, followed by small steps: one outlier moves it as little
    as any other value does.
    """

    least: float = 0.0
    most: float = inf
    value: float = 1.0
    seen: int = 0

    def see(self, value: float) -> None:
        """Move towards `value`, by a part that shrinks as more is seen."""
        self.seen += 1
        factor = 1.0 + max(SLOW, QUICK / sqrt(self.seen))
        moved = self.value * factor if value > self.value else self.value / factor
        self.value = min(self.most, max(self.least, moved))


@dataclass(slots=True)
class Correction:
    """`usual`: what steps of decoding alone take, over what the pace predicts. `dearer`: what prompt rows take, over
    what it predicts for them, on a machine where decoding is as usual. `alone`: what steps of prompt rows alone take,
    over what it predicts; the router's admission needs it to predict waits.
    """

    usual: RunningMedian = field(default_factory=RunningMedian)
    dearer: RunningMedian = field(default_factory=lambda: RunningMedian(1.0 / MOST, MOST))
    alone: RunningMedian = field(default_factory=RunningMedian)

    def decoded(self, decode_us: float, took_us: float) -> None:
        """A step of decoding alone took `took_us`; `decode_us` was predicted."""
        self.usual.see(took_us / decode_us)

    def prompted(self, busy_us: float, rows_us: float, took_us: float) -> None:
        """A step in which this rank took prompt rows took `took_us`; `busy_us` was predicted for
        its other work and `rows_us` for the rows.
        """
        if rows_us >= TELLING * busy_us:
            self.dearer.see((took_us / self.usual.value - busy_us) / rows_us)

    def prefilled(self, alone_us: float, took_us: float) -> None:
        """A step of prompt rows alone took `took_us`; `alone_us` was predicted."""
        self.alone.see(took_us / alone_us)
