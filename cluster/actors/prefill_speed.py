"""How fast a rank computes prompts, by the rules of `engine/prefill.py` and the measured step times.

A prompt row is one prompt token to compute. While no request of any rank decodes, a step holds at most
`chunked_prefill_size` prompt rows. While some request decodes, the prefill budget of `prefill_share` limits the prompt
rows of a step. All ranks run each step together, so the slowest rank decides how long the step takes. If
`mixed_prefill_size` is set, step times are not measured, and the time per row is learnt from earlier prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.observability.step_times import StepTimes

BUCKET = 256  # in tokens; chunks of prompt rows that start in the same bucket are assumed to cost the same
US = 1e-6


class Drift(NamedTuple):
    """The ratios of the present step times of a rank to the step times that were measured at start. `decode` is the
    ratio for steps that only decode, `prefill` for steps with only prompt rows. If a step has decoding requests and
    prompt rows, its prompt rows take `decode * prompt` times as long as measured.
    """

    decode: float = 1.0
    prompt: float = 1.0
    prefill: float = 1.0

    @classmethod
    def of_gang(cls, ranks: Sequence["Drift"]) -> "Drift":
        """Return, for each ratio, the largest value of all ranks, because the slowest rank decides how long a step
        takes. Values of exactly 1.0 are skipped, because such a rank has learnt nothing yet; if all are 1.0, the result
        is 1.0.
        """
        columns = zip(*ranks, strict=True)
        return cls(*(max((value for value in column if value != 1.0), default=1.0) for column in columns))


class RankWork(NamedTuple):
    """The present work of one rank. `committed` holds the number of tokens of each decoding request. `uncomputed_rows`
    prompt rows are left to compute. `start` is the number of tokens that are computed before a chunk of the next step,
    as an average over the step's prompt rows.
    """

    committed: Sequence[int]
    start: int = 0
    uncomputed_rows: int = 0


class PromptSeconds(NamedTuple):
    """Predicted seconds to compute one whole prompt: `with_decodes` if at all times a request of the gang decodes,
    `without_decodes` if no request decodes. Each time decoding begins while the prompt is computed, `decode_delay_s`
    seconds are added, because a rank learns one step late that other ranks decode.
    """

    with_decodes: float
    without_decodes: float
    decode_delay_s: float


@dataclass(slots=True)
class PrefillSpeed:
    """The time that one rank needs for prompt rows. `step_times` holds the measured step times; if it is None, every
    row takes `seconds_per_row` seconds.
    """

    step_times: StepTimes | None
    seconds_per_row: float
    chunk_rows: int  # the largest number of prompt rows of a step
    committed: Sequence[int]  # tokens of each decoding request of this rank; (1,) if no request of the gang decodes
    busiest_us: float  # longest decoding time per step among the other ranks
    other_prefills: Sequence[RankWork]  # other ranks that compute prompts
    drift: Drift = field(default_factory=Drift)
    _row_seconds: dict[tuple[int, int], float] = field(default_factory=dict)  # seconds per row, by bucket and chunk
    # (seconds, prompt rows) of a step in which requests decode, by bucket.
    _steps_with_decodes: dict[int, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of_ranks(
        cls,
        chunk_rows: int,
        step_times: StepTimes | None,
        seconds_per_row: float,
        works: Sequence[RankWork],
        drift: Drift,
    ) -> "list[PrefillSpeed]":
        """Return the prefill speed of each rank. `works` holds the present work of all ranks. A step has at most
        `chunk_rows` prompt rows.
        """
        decodes = any(work.committed for work in works)
        decode_us = [0.0 if step_times is None else step_times.decoding(work.committed) for work in works]
        longest_us, second_us = ([*sorted(decode_us, reverse=True), 0.0])[:2]
        return [
            cls(
                step_times=step_times,
                seconds_per_row=seconds_per_row,
                chunk_rows=chunk_rows,
                committed=work.committed if decodes else (1,),
                busiest_us=second_us if own_us == longest_us else longest_us,
                other_prefills=[other for other in works if other.uncomputed_rows and other is not work],
                drift=drift,
            )
            for work, own_us in zip(works, decode_us, strict=True)
        ]

    def seconds(self, start: int, rows: int, queued: int) -> PromptSeconds:
        """Return how long a prompt will take of which `start` tokens are computed and `rows` rows are not. `queued` is
        the number of prompt rows that the rank must still compute for all its prompts.
        """
        if self.step_times is None:
            return PromptSeconds(rows * self.seconds_per_row, rows * self.seconds_per_row, 0.0)
        chunk = max(1, min(self.chunk_rows, queued))
        # A chunk costs more if more tokens precede it. Assume that all chunks cost as much as the one in the middle.
        middle_start = start + max(0, rows - chunk) // 2
        row_s = self._row_seconds_without_decodes(middle_start, chunk)
        decode_delay_s = chunk * row_s if self.other_prefills else 0.0
        step_s, rows_per_step = self._step_with_decodes(middle_start)
        return PromptSeconds(rows * step_s / rows_per_step, rows * row_s, decode_delay_s)

    def overtaking_rows(self, start: int) -> tuple[float, float]:
        """Return (seconds, rows) of a step with decoding requests. The step computes rows of the first queued prompt,
        of which `start` tokens are computed already. `rows` is the mean number of rows of later prompts that fit into
        the step besides these. Return (0.0, 0.0) if step times were not measured.
        """
        step_times = self.step_times
        if step_times is None:
            return 0.0, 0.0
        step_s, rows = self._step_with_decodes(start)
        decode_rows, count = len(self.committed) * step_times.tree, max(1, int(rows))
        # The cost of one more row of the first prompt, and the cost of the first row of another prompt.
        cost_of_next_row = step_times.cost(decode_rows, start, count + 1) - step_times.cost(decode_rows, start, count)
        cost_of_new_row = step_times.cost(decode_rows + count, 0, 1)
        # On average a step leaves a part of its budget unused that is half of the cost of one more row.
        return step_s, max(0.0, (cost_of_next_row / cost_of_new_row - 1) / 2) if cost_of_new_row else 0.0

    def step_s(self, start: int, rows: int, decodes: bool) -> float:
        """Return the seconds of a step that computes `rows` prompt rows after `start` tokens, or as many of them as fit
        into the step. `decodes` is True if some request of the gang decodes. Return 0.0 if step times were not
        measured.
        """
        if self.step_times is None:
            return 0.0
        if decodes:
            return self._step_with_decodes(start)[0]
        return self._step_without_decodes_us(start, min(rows, self.chunk_rows)) * US

    def _step_with_decodes(self, start: int) -> tuple[float, float]:
        """Return (seconds, prompt rows of this rank) of a step with decoding requests."""
        bucket = start // BUCKET
        if bucket not in self._steps_with_decodes:
            step_us, rows = self._step_with_decodes_us(start)
            self._steps_with_decodes[bucket] = step_us * US, rows
        return self._steps_with_decodes[bucket]

    def _row_seconds_without_decodes(self, start: int, chunk: int) -> float:
        """Return the seconds per prompt row in steps of `chunk` rows while no request decodes."""
        key = (start // BUCKET, chunk)
        if key not in self._row_seconds:
            self._row_seconds[key] = self._step_without_decodes_us(start, chunk) * US / chunk
        return self._row_seconds[key]

    def _step_with_decodes_us(self, start: int) -> tuple[float, float]:
        """Compute `_step_with_decodes`, with the time in microseconds."""
        step_times, num_others = self.step_times, len(self.other_prefills)
        if step_times is None:
            return 0.0, 1.0
        prefill_budget, decode_rows = (
            step_times.prefill_budget(self.committed, self.busiest_us),
            len(self.committed) * step_times.tree,
        )
        allowance = prefill_budget.allowance / self.drift.prompt
        rows: float = step_times.max_rows(decode_rows, start, self.chunk_rows, allowance, num_others)
        min_rows = step_times.min_rows(decode_rows, start, self.chunk_rows, num_others)
        # The scheduler takes `min_rows` rows, although they exceed the budget, and gives the next steps a smaller
        # budget. On average a step then has fewer rows than `min_rows`.
        if rows < min_rows:
            rows = min_rows * allowance / step_times.cost(decode_rows, start, min_rows, num_others)
        return self.drift.decode * (prefill_budget.busy + prefill_budget.allowance), max(rows, 1e-3)

    def _step_without_decodes_us(self, start: int, rows: int) -> float:
        """Return the microseconds of a step in which no request decodes. The step takes as long as on its slowest rank:
        the chunk of another rank may cost more.
        """
        step_times = self.step_times
        if step_times is None:
            return 0.0
        chunks = [
            (start, rows),
            *((other.start, min(self.chunk_rows, other.uncomputed_rows)) for other in self.other_prefills),
        ]
        cost = max(step_times.cost(0, chunk_start, count, len(self.other_prefills)) for chunk_start, count in chunks)
        return self.drift.prefill * (step_times.fixed + cost)
