"""Corrects the pace (`StepTimes`, fitted to steps measured at start) by the times of steps while serving.

The correction changes how many prompt rows run beside decoding requests, and which waits routers expect. It never
changes tokens.
"""

from dataclasses import dataclass, field
from math import inf, sqrt

QUICK, SLOW = 0.2, 0.02  # relative change of an estimate by its first observation; the smallest by a later one
MOST = 3.0  # limits `dearer` to [1/3, 3]: a machine that is busy for a while must not starve prompts
TELLING = 1 / 20  # prompt rows are measured only if they are predicted to take this share of the decoding time


@dataclass(slots=True)
class RunningMedian:
    """A running estimate of the median of observed values, kept between `least` and `most`. An observation moves the
    estimate by a factor that does not depend on the observed value, so outliers count no more than other values.
    """

    least: float = 0.0
    most: float = inf
    value: float = 1.0
    seen: int = 0

    def see(self, value: float) -> None:
        """Move the estimate towards `value`, by a factor that shrinks with the number of observations."""
        self.seen += 1
        factor = 1.0 + max(SLOW, QUICK / sqrt(self.seen))
        moved = self.value * factor if value > self.value else self.value / factor
        self.value = min(self.most, max(self.least, moved))


@dataclass(slots=True)
class Correction:
    """Ratios of measured to predicted times. `usual`: steps that only decode. `dearer`: prompt rows beside decoding,
    after the time of the whole step is divided by `usual`. `alone`: steps of prompt rows only; routers predict waits by
    `alone`.
    """

    usual: RunningMedian = field(default_factory=RunningMedian)
    dearer: RunningMedian = field(default_factory=lambda: RunningMedian(1.0 / MOST, MOST))
    alone: RunningMedian = field(default_factory=RunningMedian)

    def decoded(self, decode_us: float, took_us: float) -> None:
        """Observe a step that only decoded: it took `took_us`, and `decode_us` was predicted."""
        self.usual.see(took_us / decode_us)

    def prompted(self, busy_us: float, rows_us: float, took_us: float) -> None:
        """Observe a step with prompt rows beside decoding: the step took `took_us`; `busy_us` was predicted for the
        decoding, and `rows_us` for the prompt rows.
        """
        if rows_us >= TELLING * busy_us:
            # took = usual * (busy + dearer * rows), solved for `dearer`
            self.dearer.see((took_us / self.usual.value - busy_us) / rows_us)

    def prefilled(self, alone_us: float, took_us: float) -> None:
        """Observe a step of prompt rows only: it took `took_us`, and `alone_us` was predicted."""
        self.alone.see(took_us / alone_us)
