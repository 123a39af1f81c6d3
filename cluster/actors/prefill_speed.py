"""How fast a rank computes prompts: the rules of `engine/scheduler.py` with the times of steps that were measured.

While no request of any rank decodes, a step holds as many prompt rows as `chunked_prefill_size` allows. While some
request decodes, it holds as many as `prefill_share` pays for. All ranks step together, so a step lasts as long as the
slowest rank's. With `mixed_prefill_size` no steps are measured; then a row takes what rows of earlier prompts took.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.config import EngineConfig
from cluster.observability.step_times import StepTimes

UNLIMITED = 1 << 30
BUCKET = 256  # tokens: prompt rows that start in the same bucket are taken to cost the same
US = 1e-6


def chunk_of(config: EngineConfig) -> int:
    """The most prompt rows of a step."""
    return config.chunked_prefill_size if config.chunked_prefill_size > 0 else UNLIMITED


class Drift(NamedTuple):
    """How many times as long a rank's steps take by now as was measured at start: `decode` steps of decoding alone,
    `alone` steps of prompt rows alone. Prompt rows beside decoding take `decode` times `prompt` as long.
    """

    decode: float = 1.0
    prompt: float = 1.0
    alone: float = 1.0

    @classmethod
    def of_gang(cls, ranks: Sequence["Drift"]) -> "Drift":
        """The largest of the ranks' figures, as the slowest rank decides; 1.0 is that of a rank that knows nothing."""
        columns = zip(*ranks, strict=True)
        return cls(*(max((value for value in column if value != 1.0), default=1.0) for column in columns))


class RankWork(NamedTuple):
    """What one rank does now. `committed`: the tokens of each request that decodes. `rows` prompt rows are left to
    compute, of which those of the next step follow `start` tokens of their prompts, on average.
    """

    committed: Sequence[int]
    start: int = 0
    rows: int = 0


class PromptSeconds(NamedTuple):
    """How long a rank takes for a prompt: while some request of the gang decodes (`beside`), and while none does
    (`alone`). When requests begin to decode, `late` seconds are lost: a rank learns a step late what others decode.
    """

    beside: float
    alone: float
    late: float


@dataclass(slots=True)
class PrefillSpeed:
    """The prompt rows of one rank, in seconds: by `pace` or, where that was not measured, `row_s` for each."""

    pace: StepTimes | None
    row_s: float
    chunk: int  # the most prompt rows of a step
    committed: Sequence[int]  # of the requests that decode on this rank; one request where no rank has any
    busiest_us: float  # the decoding of the busiest other rank
    others: Sequence[RankWork]  # the other ranks that compute prompts
    drift: Drift = field(default_factory=Drift)
    _alone: dict[tuple[int, int], float] = field(default_factory=dict)  # seconds of a row, by bucket and chunk
    _beside: dict[int, tuple[float, float]] = field(default_factory=dict)  # of a step and its rows, by bucket

    @classmethod
    def of_ranks(
        cls, config: EngineConfig, pace: StepTimes | None, row_s: float, works: Sequence[RankWork], drift: Drift
    ) -> "list[PrefillSpeed]":
        """The speed of each rank, where each does what `works` says."""
        chunk, decodes = chunk_of(config), any(work.committed for work in works)
        decode_us = [0.0 if pace is None else pace.decoding(work.committed) for work in works]
        first, second = ([*sorted(decode_us, reverse=True), 0.0])[:2]
        return [
            cls(
                pace=pace,
                row_s=row_s,
                chunk=chunk,
                committed=work.committed if decodes else (1,),
                busiest_us=second if own_us == first else first,
                others=[other for other in works if other.rows and other is not work],
                drift=drift,
            )
            for work, own_us in zip(works, decode_us, strict=True)
        ]

    def seconds(self, start: int, rows: int, queued: int) -> PromptSeconds:
        """How long the rank takes for the `rows` of a prompt that follow `start` tokens, of `queued` rows in all."""
        if self.pace is None:
            return PromptSeconds(rows * self.row_s, rows * self.row_s, 0.0)
        chunk = max(1, min(self.chunk, queued))
        middle = start + max(0, rows - chunk) // 2
        alone = self._row_alone(middle, chunk)
        late = chunk * alone if self.others else 0.0
        step_s, held = self._step_beside(middle)
        return PromptSeconds(rows * step_s / held, rows * alone, late)

    def passing(self, start: int) -> tuple[float, float]:
        """While some request decodes: the seconds of a step, and the mean number of rows of later prompts that it holds
        beside those of a prompt of which `start` tokens are computed.
        """
        pace = self.pace
        if pace is None:
            return 0.0, 0.0
        step_s, rows = self._step_beside(start)
        beside, count = len(self.committed) * pace.tree, max(1, int(rows))
        dear = pace.cost(beside, start, count + 1) - pace.cost(beside, start, count)
        cheap = pace.cost(beside + count, 0, 1)
        # The budget that stays unused in a step is on average half of the cost of one more row.
        return step_s, max(0.0, (dear / cheap - 1) / 2) if cheap else 0.0

    def step_s(self, start: int, rows: int, decodes: bool) -> float:
        """How long a step takes that holds `rows` prompt rows after `start` tokens, or as many of them as fit."""
        if self.pace is None:
            return 0.0
        if decodes:
            return self._step_beside(start)[0]
        return self._alone_us(start, min(rows, self.chunk)) * US

    def _step_beside(self, start: int) -> tuple[float, float]:
        """A step beside decoding requests: its seconds, and how many prompt rows of this rank it holds."""
        bucket = start // BUCKET
        if bucket not in self._beside:
            step_us, rows = self._beside_us(start)
            self._beside[bucket] = step_us * US, rows
        return self._beside[bucket]

    def _row_alone(self, start: int, chunk: int) -> float:
        """Seconds for each prompt row in steps of `chunk` rows while no request decodes."""
        key = (start // BUCKET, chunk)
        if key not in self._alone:
            self._alone[key] = self._alone_us(start, chunk) * US / chunk
        return self._alone[key]

    def _beside_us(self, start: int) -> tuple[float, float]:
        """As `_step_beside`, in microseconds."""
        pace, others = self.pace, len(self.others)
        if pace is None:
            return 0.0, 1.0
        prefill_budget, beside = pace.prefill_budget(self.committed, self.busiest_us), len(self.committed) * pace.tree
        allowance = prefill_budget.allowance / self.drift.prompt
        rows: float = pace.rows(beside, start, self.chunk, allowance, others)
        least = pace.least(beside, start, self.chunk, others)
        if rows < least:  # it is overdrawn in one step, and paid for in later ones
            rows = least * allowance / pace.cost(beside, start, least, others)
        return self.drift.decode * (prefill_budget.busy + prefill_budget.allowance), max(rows, 1e-3)

    def _alone_us(self, start: int, rows: int) -> float:
        """A step without decoding requests, in microseconds; another rank's prompt may make it longer."""
        pace = self.pace
        if pace is None:
            return 0.0
        chunks = [(start, rows), *((one.start, min(self.chunk, one.rows)) for one in self.others)]
        cost = max(pace.cost(0, at, count, len(self.others)) for at, count in chunks)
        return self.drift.alone * (pace.fixed + cost)
