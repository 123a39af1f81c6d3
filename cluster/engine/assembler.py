"""An order (plain values) becomes a batch (tensors): what a step needs from the host goes to the device in one copy."""

from collections.abc import Mapping
from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from cluster.batch import Batch, HostBounds, Order, PageWrite, PromptChunk, PromptRows, Text
from cluster.forward.runner import AttentionBackend
from cluster.forward.sampling import SamplingTable
from cluster.kv.page_table import PageTable
from cluster.kv.pool import cells_of
from cluster.staging import Staging


class Assembler:
    """Builds batches against one rank's page table and sampling table, which it keeps up to date on the device."""

    def __init__(
        self, table: PageTable, sampling: SamplingTable, window: int, attentions: Ordered[AttentionBackend]
    ) -> None:
        """`window` are the slots that a request may write in a step; `attentions` learn the bounds of every step."""
        self._table, self._sampling, self._attentions = table, sampling, attentions
        self._device = table.device_pages.device
        self._ahead = torch.arange(window, device=self._device)

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
        longest = max((most for _, most in order.decodes), default=0)
        for attention in self._attentions:
            attention.prepare(HostBounds(longest, tuple((chunk.start, chunk.stop) for chunk in order.chunks)))
        rows = sent["rows"]
        decode_rows = rows[:decodes]
        seq_lens = self._table.lens.index_select(0, decode_rows)
        return Batch(
            rows=rows,
            decode_rows=decode_rows,
            seq_lens=seq_lens,
            window=self._table.slots(decode_rows[:, None], seq_lens[:, None] + self._ahead),
            sampling=self._sampling.take(rows, order.noisy, order.filtered),
            prompt=self._prompt(sent),
            copies=sent["copies"].view(2, -1),
            logprobs=order.logprobs,
        )

    def _prompt(self, sent: Mapping[str, Tensor]) -> PromptRows:
        text = Text(sent["chunk rows"], sent["starts"], sent["indptr"])
        return PromptRows(
            rows=sent["token rows"],
            token_ids=sent["tokens"],
            next_ids=sent["next"],
            positions=sent["positions"],
            write=self._table.slots(sent["token rows"], sent["positions"]),
            text=text if text.rows.shape[0] else None,
            final_rows=sent["final rows"],
            final_lens=sent["final lens"],
        )


def _stage_writes(writes: Ordered[PageWrite], staging: Staging) -> None:
    cleared = [write.row for write in writes if write.entry < 0]
    staging.add("cleared", cleared)
    staging.add("written", (number for column in zip(*writes[len(cleared) :], strict=True) for number in column))


def _stage_prompt(chunks: Ordered[PromptChunk], staging: Staging) -> None:
    tokens: list[int] = []
    after: list[int] = []
    indptr = [0]
    final_rows: list[int] = []
    for chunk in chunks:
        tokens += chunk.tokens[: _length(chunk)]
        indptr.append(len(tokens))
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
    staging.add("indptr", indptr)
    staging.add("starts", [chunk.start for chunk in chunks])
    staging.add("chunk rows", [chunk.row for chunk in chunks])


def _length(chunk: PromptChunk) -> int:
    return chunk.stop - chunk.start
