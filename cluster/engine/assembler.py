"""Turns a `StepInput` (plain values) into a `Batch` (tensors), with one copy from the host to the device per step.

`send` runs eagerly, because its work depends on how much has changed since the last step. `batch` is the beginning of
the step's program, which is the same for all steps of one key and can be captured.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from cluster.batch import Batch, HostBounds, PageWrite, PromptBatch, PromptChunk, PromptRows, SamplingMode, StepInput
from cluster.config.resolved import ResolvedSettings
from cluster.device.staging import Sent, Staging
from cluster.kv.pool import SlotMemory, cells_of
from cluster.models.runner import DraftRunner, TargetRunner
from cluster.spec.step import RequestTables


class Assembler:
    """Builds the batches of one rank, and keeps its tables on the device up to date."""

    def __init__(
        self,
        tables: RequestTables,
        resolved: ResolvedSettings,
        slots: Ordered[SlotMemory],
        runners: Ordered[TargetRunner | DraftRunner],
        turns: int = 1,
    ) -> None:
        """`slots` is all memory that is indexed by slots, for copies of pages.
        `runners` get the host's bounds before each step. They have `turns` buffer sets, one for each step that may be
        in flight.
        """
        self.turns = turns
        self.turn = 0
        """The buffer set of the step that was sent last."""
        self._table, self._sampling, self._adjusting = tables.pages, tables.sampling, tables.adjusting
        self._slots, self._runners = slots, runners
        self._device = self._table.device_pages.device
        self._window, self._beyond = resolved.shape.window, resolved.positions_beyond
        self._ahead = torch.arange(self._window + resolved.forced_shape.forced, device=self._device)
        none = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._no_prompt = PromptBatch(none, none, none, none, none, None, none, none)

    @property
    def idle_row(self) -> int:
        """The table row of idle requests."""
        return self._table.idle_row

    def send(self, order: StepInput, forced: int) -> Sent:
        """Send the numbers of a step to the device, and apply its changes to tables and pools there. Return the numbers
        that `batch` needs. The trees of the step hold up to `forced` nodes that grammars force.
        """
        staging = Staging(self._device)
        if order.adjustings or SamplingMode.ADJUSTED in order.mode:
            self._adjusting.adjustments.make()
        finals = [chunk.row for chunk in order.chunks if chunk.final] + [self.idle_row] * order.idle_finals
        staging.add("rows", [decode.row for decode in order.decodes] + finals)
        if order.chunks:
            _stage_prompt(order, staging, self.idle_row)
        if SamplingMode.PROMPT_LOGPROBS in order.mode:
            staging.add("scored", _scored(order.chunks))
        inputs = len(staging)  # the lists so far are the program's inputs; the lists below are applied here
        changes = bool(order.lens or order.copies or order.writes or order.samplings)
        if changes:
            staging.add("set", (row for row, _ in order.lens))
            staging.add("lens", (count for _, count in order.lens))
            staging.add("copies", cells_of(order.copies, self._table.page_size))
            _stage_writes(order.writes, staging)
            self._sampling.stage(order.samplings, staging)
            self._adjusting.stage(order, staging)
        sent = staging.sent()
        if changes:
            sent, rest = sent.cut(inputs)
            self._change(order, rest.lists())
        longest = max((decode.most for decode in order.decodes), default=0)
        chunks = tuple((chunk.start, chunk.stop) for chunk in order.chunks)
        self.turn = (self.turn + 1) % self.turns  # a step in flight may still use the last buffer set
        bounds = HostBounds(longest, chunks, forced, tuple(decode.least for decode in order.decodes), self.turn)
        positions = max((longest, *(stop for _, stop in chunks))) + self._beyond
        for runner in self._runners:
            runner.prepare(bounds, positions)
        return sent

    def _change(self, order: StepInput, changes: dict[str, Tensor]) -> None:
        """Apply the changes on the device, queued behind the steps in flight, which still use the old values."""
        if order.writes:
            self._table.apply(changes["cleared"], changes["written"].view(3, -1))
        if order.samplings:
            self._sampling.put(changes)
            self._adjusting.put(order, changes)
        if order.lens:
            self._table.commit(changes["set"], changes["lens"])
        if order.copies:
            for memory in self._slots:
                memory.move_kv_cache(*changes["copies"].view(2, -1))

    def batch(self, sent: Sent, mode: SamplingMode, forced: int) -> Batch:
        """Build the batch of a step. A captured program begins here: only torch operators run, no value is read."""
        lists = sent.lists()
        rows = lists["rows"]
        decode_rows = rows[: sent.lengths["rows"] - sent.lengths.get("final rows", 0)]
        seq_lens = self._table.lens.index_select(0, decode_rows)
        ahead = self._ahead[: self._window + forced]
        return Batch(
            rows=rows,
            decode_rows=decode_rows,
            seq_lens=seq_lens,
            window=self._table.slots(decode_rows[:, None], seq_lens[:, None] + ahead),
            sampling=self._sampling.take(rows, SamplingMode.NOISY in mode, SamplingMode.FILTERED in mode),
            prompt=self._prompt(lists) if "tokens" in lists else self._no_prompt,
            mode=mode,
            scored=lists.get("scored"),
        )

    def _prompt(self, sent: dict[str, Tensor]) -> PromptBatch:
        return PromptBatch(
            rows=sent["token rows"],
            token_ids=sent["tokens"],
            next_ids=sent["next"],
            positions=sent["positions"],
            write=self._table.slots(sent["token rows"], sent["positions"]),
            text=PromptRows(sent["chunk rows"], sent["starts"], sent["indptr"]),
            final_rows=sent["final rows"],
            final_lens=sent["final lens"],
        )


def _stage_writes(writes: Ordered[PageWrite], staging: Staging) -> None:
    """Stage the cleared rows, which come first in `writes`; then rows, entries, pages of the n others, as `[3 n]`."""
    cleared = [write.row for write in writes if write.entry < 0]
    staging.add("cleared", cleared)
    staging.add("written", (number for column in zip(*writes[len(cleared) :], strict=True) for number in column))


def _stage_prompt(order: StepInput, staging: Staging, idle_row: int) -> None:
    """Stage the prompt chunks: lists with one number per row, per chunk, and per prompt that ends."""
    chunks, idle = order.chunks, order.idle_finals
    empty = max(0, order.chunk_places - len(chunks))
    tokens: list[int] = []
    after: list[int] = []
    indptr = [0]
    final_rows: list[int] = []
    for chunk in chunks:
        tokens += chunk.tokens[: _length(chunk)]
        indptr.append(len(tokens))
        after += chunk.tokens[1:]
        if chunk.final:  # the next token is not known: extend inserts the one that the target chooses
            after.append(0)
            final_rows.append(len(tokens) - 1)
    staging.add("tokens", tokens)
    staging.add("next", after)
    staging.add("positions", (at for chunk in chunks for at in range(chunk.start, chunk.stop)))
    staging.add("token rows", (chunk.row for chunk in chunks for _ in range(_length(chunk))))
    # Padding entries of "final rows" point at row 0, a dummy row: padding puts idle chunks first.
    staging.add("final rows", final_rows + [0] * idle)
    staging.add("final lens", [chunk.stop for chunk in chunks if chunk.final] + [0] * idle)
    staging.add("indptr", indptr + [len(tokens)] * empty)  # chunks without rows
    staging.add("starts", [chunk.start for chunk in chunks] + [0] * empty)
    staging.add("chunk rows", [chunk.row for chunk in chunks] + [idle_row] * empty)


def _scored(chunks: Iterable[PromptChunk]) -> Iterator[int]:
    """The indices, among prompt rows, of rows that return log-probabilities: the first `scored` of each chunk."""
    start = 0
    for chunk in chunks:
        yield from range(start, start + chunk.scored)
        start += _length(chunk)


def _length(chunk: PromptChunk) -> int:
    return chunk.stop - chunk.start
