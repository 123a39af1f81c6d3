"""An order (plain values) becomes a batch (tensors): what a step needs from the host goes to the device in one copy."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from cluster.attention.plan import causal_bias, partly_written, reach_of, window_group
from cluster.batch import Batch, Group, Mode, Order, PageWrite, PromptChunk, PromptRows
from cluster.forward.sampling import SamplingTable
from cluster.kv.page_table import PageTable
from cluster.kv.pool import cells_of
from cluster.staging import Staging


class Assembler:
    """Builds batches against one rank's page table and sampling table, which it keeps up to date on the device."""

    def __init__(self, table: PageTable, sampling: SamplingTable, window: int, dtype: torch.dtype) -> None:
        self._table, self._sampling = table, sampling
        self._window, self._dtype = window, dtype
        self._device = table.device_pages.device

    @property
    def idle_row(self) -> int:
        """The table row of idle requests."""
        return self._table.idle_row

    def batch(self, order: Order) -> Batch:
        """The batch of this step, after the order's changes to the tables."""
        staging, decodes = Staging(self._device), len(order.decodes)
        staging.add("rows", [row for row, _ in order.decodes] + [chunk.row for chunk in order.chunks if chunk.final])
        staging.add("set", (row for row, _ in order.lens))
        staging.add("lens", (count for _, count in order.lens))
        staging.add("copies", cells_of(order.copies, self._table.page_size))
        _stage_writes(order.writes, staging)
        self._sampling.stage(order.samplings, staging)
        _stage_prompt(order.chunks, staging)
        sent = staging.sent()
        if order.writes:
            self._table.apply(sent["cleared"], sent["written"].view(3, -1))
        if order.samplings:
            self._sampling.put(sent)
        if order.lens:
            self._table.commit(sent["set"], sent["lens"])
        rows, longest = sent["rows"], max((most for _, most in order.decodes), default=0)
        seq_lens = self._table.lens.index_select(0, rows[:decodes])
        return Batch(
            decodes=decodes,
            rows=rows,
            seq_lens=seq_lens,
            reach=reach_of(self._table, rows[:decodes], seq_lens, longest, self._window, self._dtype),
            sampling=self._sampling.take(rows, Mode.NOISY in order.mode, Mode.FILTERED in order.mode),
            prompt=self._prompt(order.chunks, sent),
            copies=sent["copies"].view(2, -1),
            logprobs=Mode.LOGPROBS in order.mode,
        )

    def _prompt(self, chunks: Ordered[PromptChunk], sent: Mapping[str, Tensor]) -> PromptRows:
        return PromptRows(
            token_ids=sent["tokens"],
            next_ids=sent["next"],
            positions=sent["positions"],
            write=self._table.slots(sent["token rows"], sent["positions"]),
            groups=tuple(self._group(chunks, part, sent) for part in _parts(chunks)),
            final_rows=sent["final rows"],
            final_lens=sent["final lens"],
        )

    def _group(self, chunks: Ordered[PromptChunk], part: slice, sent: Mapping[str, Tensor]) -> Group:
        """The attention group of some chunks, in order of length, padded to the longest."""
        q, longest = _length(chunks[part][-1]), max(chunk.start for chunk in chunks[part])
        lengths, first_rows = sent["lengths"][part], sent["first rows"][part]
        reach = reach_of(self._table, sent["chunk rows"][part], sent["starts"][part], longest, q, self._dtype)
        row = torch.arange(q, device=self._device)
        rows = (first_rows[:, None] + torch.where(row < lengths[:, None], row, 0)).view(-1)
        bias = causal_bias(q, self._dtype, self._device)
        return window_group(partly_written(reach, lengths), bias, rows, sent.get(f"back {part.start}"))


def _stage_writes(writes: Ordered[PageWrite], staging: Staging) -> None:
    cleared = [write.row for write in writes if write.entry < 0]
    staging.add("cleared", cleared)
    staging.add("written", (number for column in zip(*writes[len(cleared) :], strict=True) for number in column))


def _stage_prompt(chunks: Ordered[PromptChunk], staging: Staging) -> None:
    tokens: list[int] = []
    after: list[int] = []
    first_rows: list[int] = []
    final_rows: list[int] = []
    for chunk in chunks:
        first_rows.append(len(tokens))
        tokens += chunk.tokens[: _length(chunk)]
        after += chunk.tokens[1:]
        if chunk.final:
            after.append(0)
            final_rows.append(len(tokens) - 1)
    staging.add("tokens", tokens)
    staging.add("next", after)
    staging.add("positions", (at for chunk in chunks for at in range(chunk.start, chunk.stop)))
    staging.add("token rows", (chunk.row for chunk in chunks for _ in range(_length(chunk))))
    staging.add("final rows", final_rows)
    staging.add("final lens", [chunk.stop for chunk in chunks if chunk.final])
    staging.add("first rows", first_rows)
    staging.add("lengths", map(_length, chunks))
    staging.add("starts", [chunk.start for chunk in chunks])
    staging.add("chunk rows", [chunk.row for chunk in chunks])
    for part in _parts(chunks):
        q = _length(chunks[part][-1])
        if _length(chunks[part][0]) < q:  # which of the padded rows are real
            real = (i * q + at for i, chunk in enumerate(chunks[part]) for at in range(_length(chunk)))
            staging.add(f"back {part.start}", real)


def _length(chunk: PromptChunk) -> int:
    return chunk.stop - chunk.start


def _parts(chunks: Ordered[PromptChunk]) -> Iterator[slice]:
    """Runs of chunks, which are in order of length, whose longest is at most twice the shortest."""
    begin = 0
    for end in range(1, len(chunks) + 1):
        if end == len(chunks) or _length(chunks[end]) > 2 * _length(chunks[begin]):
            yield slice(begin, end)
            begin = end
