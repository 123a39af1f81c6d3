"""How long one rank's prompt holds up another's decoding, from what both ranks saw."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.bench.ranks import Life, StepRecord
from cluster.bench.report import median, ratio

LONG = "long"


@dataclass(frozen=True, slots=True)
class Stall:
    """Rank A's inter-token latency: the time between two outputs of a request, as its user sees it. An output is what
    a step committed for it, one token or several.

    *busy*: all of rank B's own requests decode as well, before the long prompt and after it, so that a machine whose
    pace drifts drifts for both sides. *prefill*: from the submission of B's long prompt to its first token. `ratio` is
    A's p99 during prefill over A's median while busy. On a machine that does other things as well this is mostly their
    doing: `median_ratio` is median over median, `tail_ratio` p99 over p99, and `cpu_ratio` compares the CPU seconds of
    the slower rank's steps, median over median.
    """

    ratio: float
    median_ratio: float
    tail_ratio: float
    cpu_ratio: float
    busy_median_ms: float
    busy_p99_ms: float
    prefill_median_ms: float
    prefill_p99_ms: float
    first_token_s: float
    prompt_steps: int


def stall_of(lives: Sequence[Life], long: str = LONG) -> Stall:
    """The stall in one life of ranks A and B."""
    a, b = lives
    submitted, first = b.submitted[long], b.times[long][0]
    windows = [
        (max(times[0] for times in group), min(times[-1] for times in group))
        for late in (False, True)
        if (group := [b.times[n] for n, at in b.submitted.items() if n != long and (at > submitted) is late])
    ]
    busy = [gap for window in windows for gap in gaps(a, *window)]
    prefill, middle = gaps(a, submitted, first), median(busy)
    steps = list(zip(a.steps, b.steps, strict=True))
    return Stall(
        ratio=ratio(p99(prefill), middle),
        median_ratio=ratio(median(prefill), middle),
        tail_ratio=ratio(p99(prefill), p99(busy)),
        cpu_ratio=ratio(
            _cpu([s for s in steps if submitted <= s[1].began < first and s[1].prompt_rows]),
            _cpu([s for s in steps if any(began <= s[1].began < ended for began, ended in windows)]),
        ),
        busy_median_ms=1000 * middle,
        busy_p99_ms=1000 * p99(busy),
        prefill_median_ms=1000 * median(prefill),
        prefill_p99_ms=1000 * p99(prefill),
        first_token_s=first - submitted,
        prompt_steps=sum(s.prompt_rows > 0 for s in b.steps if submitted <= s.began < first),
    )


def gaps(life: Life, start: float, stop: float) -> list[float]:
    """Seconds between successive outputs of each of the rank's requests, both between `start` and `stop`."""
    return [
        after - before
        for times in life.times.values()
        for before, after in pairwise(times)
        if start <= before and after <= stop
    ]


def p99(values: Sequence[float]) -> float:
    """The least value that 99% do not exceed; 0.0 of none."""
    return sorted(values)[-(-99 * len(values) // 100) - 1] if values else 0.0


def _cpu(steps: Sequence[tuple[StepRecord, StepRecord]]) -> float:
    return median([max(a.cpu, b.cpu) for a, b in steps])
