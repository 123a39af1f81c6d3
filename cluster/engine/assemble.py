"""A schedule (host) becomes a batch (tensors)."""

from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from cluster.attention.plan import causal_bias, reach_of, window_group
from cluster.batch import Batch, Group, PromptRows
from cluster.engine.scheduler import Chunk, Schedule
from cluster.engine.sequence import Sequence
from cluster.forward.sampler import SamplingTable


class Assembler:
    """Builds batches against one rank's slot table `[rows, length]` and sampling table."""

    def __init__(self, table: Tensor, sampling: SamplingTable, window: int, dtype: torch.dtype) -> None:
        self._table, self._sampling, self._window, self._dtype = table, sampling, window, dtype
        self._device = table.device
        self._no_prompt = self._prompt([])

    def batch(self, schedule: Schedule) -> Batch:
        """The batch of this step. Chunks are put in order of length, so that equal ones form groups."""
        schedule.chunks.sort(key=lambda chunk: chunk.stop - chunk.start)
        finals = [chunk.sequence for chunk in schedule.chunks if chunk.final]
        sequences = schedule.decodes + finals
        rows = self._ints([_row(s) for s in sequences])
        params = [s.request.params for s in sequences]
        noisy = any(p.temperature > 0 for p in params)
        filtered = any(p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p > 0) for p in params)
        committed = [s.committed for s in schedule.decodes]
        seq_lens, decodes = self._ints(committed), len(committed)
        longest = max(committed, default=0)
        return Batch(
            decodes=decodes,
            rows=rows,
            seq_lens=seq_lens,
            reach=reach_of(self._table, rows[:decodes], seq_lens, longest, self._window, self._dtype),
            sampling=self._sampling.take(rows, noisy, filtered),
            prompt=self._prompt(schedule.chunks) if schedule.chunks else self._no_prompt,
            logprobs=any(p.logprobs is not None for p in params),
        )

    def _ints(self, values: Ordered[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _prompt(self, chunks: list[Chunk]) -> PromptRows:
        tokens: list[int] = []
        after: list[int] = []
        finals: list[int] = []
        for chunk in chunks:
            known = chunk.sequence.tokens
            tokens += known[chunk.start : chunk.stop]
            after += known[chunk.start + 1 : chunk.stop + 1]
            if chunk.final:
                after.append(0)
                finals.append(len(tokens) - 1)
        lengths = self._ints([chunk.stop - chunk.start for chunk in chunks])
        starts = self._ints([chunk.start for chunk in chunks])
        table_rows = self._ints([_row(chunk.sequence) for chunk in chunks])
        first_rows = lengths.cumsum(0) - lengths
        within = torch.arange(len(tokens), device=self._device) - first_rows.repeat_interleave(lengths)
        positions = starts.repeat_interleave(lengths) + within
        return PromptRows(
            token_ids=self._ints(tokens),
            next_ids=self._ints(after),
            positions=positions,
            write=self._table[table_rows.repeat_interleave(lengths), positions],
            groups=tuple(self._groups(chunks, table_rows, starts, lengths, first_rows)),
            final_rows=self._ints(finals),
            final_lens=self._ints([chunk.stop for chunk in chunks if chunk.final]),
        )

    def _groups(
        self, chunks: list[Chunk], table_rows: Tensor, starts: Tensor, lengths: Tensor, first_rows: Tensor
    ) -> list[Group]:
        """Groups of chunks whose longest is at most twice the shortest, padded to the longest."""
        groups, begin = [], 0
        sizes = [chunk.stop - chunk.start for chunk in chunks]
        for end in range(1, len(chunks) + 1):
            if end < len(chunks) and sizes[end] <= 2 * sizes[begin]:
                continue
            q, part = sizes[end - 1], slice(begin, end)
            longest = max(chunk.start for chunk in chunks[part])
            reach = reach_of(self._table, table_rows[part], starts[part], longest, q, self._dtype)
            row = torch.arange(q, device=self._device)
            real = row < lengths[part, None]
            rows = (first_rows[part, None] + torch.where(real, row, 0)).view(-1)
            back = None if sizes[begin] == q else real.view(-1).nonzero()[:, 0]
            groups.append(window_group(reach, causal_bias(q, self._dtype, self._device), rows, back))
            begin = end
        return groups


def _row(sequence: Sequence) -> int:
    assert sequence.lease is not None, "only running requests are assembled"
    return sequence.lease.row
