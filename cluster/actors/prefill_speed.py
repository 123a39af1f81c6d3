"""How fast a rank computes prompts, by the rules of `engine/prefill.py` and the measured step times.

A prompt row is one prompt token to compute. While no request of any rank decodes ("alone"), a step holds at most
`chunked_prefill_size` prompt rows. While some request decodes ("beside" decoding), the prefill budget of
`prefill_share` limits the prompt rows of a step. All ranks step together, so each step lasts as long as on the slowest
rank. With `mixed_prefill_size` no steps are measured; then the time per row is learnt from earlier prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.observability.step_times import StepTimes

BUCKET = 256  # tokens: prompt rows whose start lies in the same bucket count as equally expensive
US = 1e-6


class Drift(NamedTuple):
    """How much longer steps of a rank take now than they took when they were measured at start, as ratios. `decode` is
    for steps that only decode, `alone` for steps with only prompt rows. Prompt rows in a step that decodes too take
    `decode * prompt` times as long.
    """

    decode: float = 1.0
    prompt: float = 1.0
    alone: float = 1.0

    @classmethod
    def of_gang(cls, ranks: Sequence["Drift"]) -> "Drift":
        """Return the largest of each ratio over the ranks, as the slowest rank decides. A ratio of 1.0 is skipped: that
        rank has learnt nothing yet.
        """
        columns = zip(*ranks, strict=True)
        return cls(*(max((value for value in column if value != 1.0), default=1.0) for column in columns))


class RankWork(NamedTuple):
    """The present work of one rank. `committed` holds the number of tokens of each decoding request. `rows` prompt rows
    are left to compute. `start` is the average number of tokens before each prompt row of the next step.
    """

    committed: Sequence[int]
    start: int = 0
    rows: int = 0


class PromptSeconds(NamedTuple):
    """Predicted seconds to compute one whole prompt: `beside` if some request of the gang decodes all the time, `alone`
    if no request decodes. Each time decoding begins while the prompt is computed, `late` seconds are added once,
    because a rank learns one step late that other ranks decode.
    """

    beside: float
    alone: float
    late: float


@dataclass(slots=True)
class PrefillSpeed:
    """The time that one rank needs for prompt rows. `pace` holds the measured step times; if it is None, every row
    takes `row_s` seconds.
    """

    pace: StepTimes | None
    row_s: float
    chunk: int  # the most prompt rows of a step
    committed: Sequence[int]  # tokens of each decoding request of this rank; (1,) if no request of the gang decodes
    busiest_us: float  # longest decoding time per step among the other ranks
    others: Sequence[RankWork]  # other ranks that compute prompts
    drift: Drift = field(default_factory=Drift)
    _alone: dict[tuple[int, int], float] = field(default_factory=dict)  # seconds per row, by bucket and chunk
    _beside: dict[int, tuple[float, float]] = field(default_factory=dict)  # (seconds, prompt rows) of a step, by bucket

    @classmethod
    def of_ranks(
        cls, chunk: int, pace: StepTimes | None, row_s: float, works: Sequence[RankWork], drift: Drift
    ) -> "list[PrefillSpeed]":
        """Return the speed of each rank, given the present work of all. A step has at most `chunk` prompt rows."""
        decodes = any(work.committed for work in works)
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
        """Return the time of a prompt with `rows` rows left after `start` computed tokens. `queued` is the number of
        prompt rows that the rank has to compute in total.
        """
        if self.pace is None:
            return PromptSeconds(rows * self.row_s, rows * self.row_s, 0.0)
        chunk = max(1, min(self.chunk, queued))
        # A chunk costs more the later it starts; take the cost of the chunk in the middle for all chunks.
        middle = start + max(0, rows - chunk) // 2
        alone = self._row_alone(middle, chunk)
        late = chunk * alone if self.others else 0.0
        step_s, held = self._step_beside(middle)
        return PromptSeconds(rows * step_s / held, rows * alone, late)

    def passing(self, start: int) -> tuple[float, float]:
        """Return (seconds of a step beside decoding, mean number of rows of later prompts in the step). These rows fit
        in addition to the rows of the first queued prompt, of which `start` tokens are computed.
        """
        pace = self.pace
        if pace is None:
            return 0.0, 0.0
        step_s, rows = self._step_beside(start)
        beside, count = len(self.committed) * pace.tree, max(1, int(rows))
        # The cost of one more row of the first prompt, and of the first row of a new one.
        dear = pace.cost(beside, start, count + 1) - pace.cost(beside, start, count)
        cheap = pace.cost(beside + count, 0, 1)
        # The budget that stays unused in a step is on average half of the cost of one more row.
        return step_s, max(0.0, (dear / cheap - 1) / 2) if cheap else 0.0

    def step_s(self, start: int, rows: int, decodes: bool) -> float:
        """Return the seconds of a step that computes `rows` prompt rows after `start` tokens, or fewer if not all fit.
        `decodes`: some request of the gang decodes.
        """
        if self.pace is None:
            return 0.0
        if decodes:
            return self._step_beside(start)[0]
        return self._alone_us(start, min(rows, self.chunk)) * US

    def _step_beside(self, start: int) -> tuple[float, float]:
        """Return (seconds, prompt rows of this rank) of a step beside decoding."""
        bucket = start // BUCKET
        if bucket not in self._beside:
            step_us, rows = self._beside_us(start)
            self._beside[bucket] = step_us * US, rows
        return self._beside[bucket]

    def _row_alone(self, start: int, chunk: int) -> float:
        """Return the seconds per prompt row in steps of `chunk` rows while no request decodes."""
        key = (start // BUCKET, chunk)
        if key not in self._alone:
            self._alone[key] = self._alone_us(start, chunk) * US / chunk
        return self._alone[key]

    def _beside_us(self, start: int) -> tuple[float, float]:
        """Compute `_step_beside`, with the time in microseconds."""
        pace, others = self.pace, len(self.others)
        if pace is None:
            return 0.0, 1.0
        prefill_budget, beside = pace.prefill_budget(self.committed, self.busiest_us), len(self.committed) * pace.tree
        allowance = prefill_budget.allowance / self.drift.prompt
        rows: float = pace.rows(beside, start, self.chunk, allowance, others)
        least = pace.least(beside, start, self.chunk, others)
        if rows < least:  # the scheduler takes `least` rows, more than the budget; later steps get a smaller budget
            rows = least * allowance / pace.cost(beside, start, least, others)
        return self.drift.decode * (prefill_budget.busy + prefill_budget.allowance), max(rows, 1e-3)

    def _alone_us(self, start: int, rows: int) -> float:
        """Return the microseconds of a step without decoding; longer prompts on other ranks make the step longer."""
        pace = self.pace
        if pace is None:
            return 0.0
        chunks = [(start, rows), *((one.start, min(self.chunk, one.rows)) for one in self.others)]
        cost = max(pace.cost(0, at, count, len(self.others)) for at, count in chunks)
        return self.drift.alone * (pace.fixed + cost)
