"""An order (plain values) becomes a batch (tensors)."""

from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from cluster.attention.plan import causal_bias, partly_written, reach_of, window_group
from cluster.batch import Batch, Group, Order, PromptChunk, PromptRows
from cluster.forward.sampling import SamplingTable
from cluster.kv.slots import SlotTable


class Assembler:
    """Builds batches against one rank's slot table and sampling table."""

    def __init__(self, table: SlotTable, sampling: SamplingTable, window: int, dtype: torch.dtype) -> None:
        self._slots, self._table, self._sampling = table, table.slots, sampling
        self._window, self._dtype = window, dtype
        self._device = table.slots.device
        self._no_prompt = self._prompt(())

    @property
    def idle_row(self) -> int:
        """The table row of idle requests."""
        return self._slots.idle_row

    def follow(self, order: Order) -> None:
        """Bring the slot table to where the leader's is."""
        self._slots.replay(order.writes)

    def batch(self, order: Order) -> Batch:
        """The batch of this step."""
        for s in order.samplings:
            self._sampling.put(s)
        decodes = len(order.decodes)
        finals = [chunk.row for chunk in order.chunks if chunk.final]
        rows = self._ints([row for row, _ in order.decodes] + finals)
        committed = [count for _, count in order.decodes]
        seq_lens = self._ints(committed)
        longest = max(committed, default=0)
        return Batch(
            decodes=decodes,
            rows=rows,
            seq_lens=seq_lens,
            reach=reach_of(self._table, rows[:decodes], seq_lens, longest, self._window, self._dtype),
            sampling=self._sampling.take(rows, order.noisy, order.filtered),
            prompt=self._prompt(order.chunks) if order.chunks else self._no_prompt,
            logprobs=order.logprobs,
        )

    def _ints(self, values: Ordered[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _prompt(self, chunks: Ordered[PromptChunk]) -> PromptRows:
        tokens: list[int] = []
        after: list[int] = []
        finals: list[int] = []
        for chunk in chunks:
            tokens += chunk.tokens[: chunk.stop - chunk.start]
            after += chunk.tokens[1:]
            if chunk.final:
                after.append(0)
                finals.append(len(tokens) - 1)
        lengths = self._ints([chunk.stop - chunk.start for chunk in chunks])
        starts = self._ints([chunk.start for chunk in chunks])
        table_rows = self._ints([chunk.row for chunk in chunks])
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
        self, chunks: Ordered[PromptChunk], table_rows: Tensor, starts: Tensor, lengths: Tensor, first_rows: Tensor
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
            reach = partly_written(reach, lengths[part])
            row = torch.arange(q, device=self._device)
            real = row < lengths[part, None]
            rows = (first_rows[part, None] + torch.where(real, row, 0)).view(-1)
            back = None if sizes[begin] == q else real.view(-1).nonzero()[:, 0]
            groups.append(window_group(reach, causal_bias(q, self._dtype, self._device), rows, back))
            begin = end
        return groups
