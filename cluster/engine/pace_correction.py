"""Corrects the pace (`StepTimes`, fitted to steps measured at start) by the times that steps take while serving.

The correction changes how many prompt rows run beside decoding requests, and which waits routers expect. It never
changes tokens.
"""

from dataclasses import dataclass, field
from math import inf, sqrt

FIRST_CHANGE, MIN_CHANGE = (
    0.2,
    0.02,
)  # the relative change of an estimate at its first observation, and the smallest change at any later observation
MAX_DRIFT = 3.0  # limits `prompt_drift` to [1/3, 3]: a machine that is busy for a while must not starve prompts
MIN_PROMPT_SHARE = 1 / 20  # prompt rows are measured only if they are predicted to take this share of the decoding time


@dataclass(slots=True)
class RunningMedian:
    """A running estimate of the median of observed values, kept between `minimum` and `maximum`. An observation moves
    the estimate by a factor that does not depend on the observed value, so outliers count no more than other values.
    """

    minimum: float = 0.0
    maximum: float = inf
    value: float = 1.0
    observations: int = 0

    def observe(self, value: float) -> None:
        """Move the estimate towards `value`, by a factor that shrinks with the number of observations."""
        self.observations += 1
        factor = 1.0 + max(MIN_CHANGE, FIRST_CHANGE / sqrt(self.observations))
        new_value = self.value * factor if value > self.value else self.value / factor
        self.value = min(self.maximum, max(self.minimum, new_value))


@dataclass(slots=True)
class Correction:
    """Ratios of measured to predicted times. `decode_drift` is the ratio for steps that only decode. `prompt_drift` is
    the ratio for the prompt rows of a step that also decodes: their measured time is the step's time divided by
    `decode_drift`, minus the predicted time of decoding. `prefill_drift` is the ratio for steps of prompt rows only.
    Routers predict with these ratios how long requests wait.
    """

    decode_drift: RunningMedian = field(default_factory=RunningMedian)
    prompt_drift: RunningMedian = field(default_factory=lambda: RunningMedian(1.0 / MAX_DRIFT, MAX_DRIFT))
    prefill_drift: RunningMedian = field(default_factory=RunningMedian)

    def observe_decode(self, decode_us: float, measured_us: float) -> None:
        """Observe a step that only decoded: it took `measured_us`, and `decode_us` was predicted."""
        self.decode_drift.observe(measured_us / decode_us)

    def observe_mixed(self, decode_us: float, prompt_us: float, measured_us: float) -> None:
        """Observe a step with prompt rows beside decoding: the step took `measured_us`; `decode_us` was predicted for
        the decoding, and `prompt_us` for the prompt rows.
        """
        if prompt_us >= MIN_PROMPT_SHARE * decode_us:
            # measured = decode_drift * (busy + prompt_drift * rows), solved for `prompt_drift`
            self.prompt_drift.observe((measured_us / self.decode_drift.value - decode_us) / prompt_us)

    def observe_prefill(self, prefill_us: float, measured_us: float) -> None:
        """Observe a step of prompt rows only: it took `measured_us`, and `prefill_us` was predicted."""
        self.prefill_drift.observe(measured_us / prefill_us)
