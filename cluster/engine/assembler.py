"""Turns a `StepInput` (plain values) into a `Batch` (tensors), with one copy from the host to the device per step.

`send` always runs eagerly, because its work depends on how much has changed since the last step. `batch` is the first
part of the step's program. The program is the same for all steps with one key (`ProgramKey`), so it can be captured.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from cluster.batch import (
    Batch,
    ExtendMode,
    HostBounds,
    PageWrite,
    PromptBatch,
    PromptChunk,
    PromptRows,
    SamplingMode,
    StepInput,
)
from cluster.config.resolved import ResolvedSettings
from cluster.device.staging import StagedLists, Staging
from cluster.kv.pool import KVPool, SlotMemory, copied_slots
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
        buffer_sets: int = 1,
        window_pools: Ordered[KVPool] = (),
    ) -> None:
        """`slots` is all memory that is indexed by slot, without window pools: a copy of a page is made in all
        of it, and in `window_pools`. Before a step, each of `runners` is told what the host knows about the
        step (`HostBounds`). A runner has `buffer_sets` sets of host buffers, and steps use them in turn.
        FlashInfer has two, because a step in flight may still read its set; other kernels need one.
        """
        self.buffer_sets = buffer_sets
        self.buffer_set = 0
        """The buffer set of the step that was sent last."""
        self._table, self._sampling, self._logits_tables = tables.pages, tables.sampling, tables.logits_tables
        self._history = tables.history
        self._slots, self._window_pools, self._runners = slots, window_pools, runners
        self._device = self._table.device_pages.device
        self._window, self._positions_beyond = resolved.shape.window, resolved.max_positions_ahead
        self._window_offsets = torch.arange(self._window + resolved.forced_shape.forced_nodes, device=self._device)
        empty = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._empty_prompt = PromptBatch(empty, empty, empty, empty, empty, None, empty, empty)

    @property
    def idle_row(self) -> int:
        """The table row of idle requests."""
        return self._table.idle_row

    def send(self, step_input: StepInput, forced_nodes: int) -> StagedLists:
        """Send the numbers of a step to the device. Apply the changes in `step_input` to the tables and pools there.
        Return the numbers that `batch` needs. The trees of the step hold up to `forced_nodes` nodes that grammars
        force.
        """
        staging = Staging(self._device)
        if step_input.penalties or SamplingMode.ADJUSTED in step_input.mode:
            self._logits_tables.adjustments.allocate()
        finals = [chunk.row for chunk in step_input.chunks if chunk.final] + [
            self.idle_row
        ] * step_input.idle_finishing_prompts
        staging.add("rows", [decode.row for decode in step_input.decodes] + finals)
        if step_input.chunks:
            _stage_prompt(step_input, staging, self.idle_row)
        if SamplingMode.PROMPT_LOGPROBS in step_input.mode:
            staging.add("scored", _scored_row_indices(step_input.chunks))
        input_count = len(staging)  # the lists so far are the program's inputs; those below are changes, applied here
        has_changes = bool(step_input.lens or step_input.copies or step_input.writes or step_input.samplings)
        has_changes = has_changes or bool(step_input.window_writes)
        if has_changes:
            staging.add("set", (row for row, _ in step_input.lens))
            staging.add("lens", (count for _, count in step_input.lens))
            staging.add("copies", copied_slots(step_input.copies, self._table.page_size))
            if self._window_pools:
                staging.add("window copies", copied_slots(step_input.copies, self._table.page_size, window=True))
                staging.add(
                    "window writes", (n for column in zip(*step_input.window_writes, strict=True) for n in column)
                )
            _stage_writes(step_input.writes, staging)
            self._sampling.stage(step_input.samplings, staging)
            self._logits_tables.stage(step_input, staging)
            if self._history is not None:
                self._history.stage(step_input, staging)
        sent = staging.send()
        if has_changes:
            sent, staged_changes = sent.split_at(input_count)
            self._apply_changes(step_input, staged_changes.lists())
        max_seq_len = max((decode.max_seq_len for decode in step_input.decodes), default=0)
        chunks = tuple((chunk.start, chunk.stop) for chunk in step_input.chunks)
        self.buffer_set = (self.buffer_set + 1) % self.buffer_sets  # the step before may still read its own set
        bounds = HostBounds(
            max_seq_len,
            chunks,
            forced_nodes,
            tuple(decode.min_seq_len for decode in step_input.decodes),
            self.buffer_set,
        )
        positions = max((max_seq_len, *(stop for _, stop in chunks))) + self._positions_beyond
        for runner in self._runners:
            runner.prepare(bounds, positions)
        return sent

    def _apply_changes(self, step_input: StepInput, changes: dict[str, Tensor]) -> None:
        """Apply the changes on the device, queued behind the steps in flight, which still use the old values."""
        if step_input.writes:
            self._table.apply(changes["cleared"], changes["written"].view(3, -1))
        if step_input.window_writes and self._table.window_map is not None:
            self._table.window_map.apply(changes["window writes"].view(2, -1))
        if step_input.samplings:
            self._sampling.put(changes)
            self._logits_tables.put(step_input, changes)
        if self._history is not None:
            self._history.put(step_input, changes)
        if step_input.lens:
            self._table.commit(changes["set"], changes["lens"])
        if step_input.copies:
            for memory in self._slots:
                memory.move_kv_cache(*changes["copies"].view(2, -1))
            for pool in self._window_pools:
                pool.move_own_slots(*changes["window copies"].view(2, -1))

    def batch(
        self, sent: StagedLists, mode: SamplingMode, forced_nodes: int, extend_mode: ExtendMode = ExtendMode.ACCEPTED
    ) -> Batch:
        """Build the batch of a step. A captured program begins here, so only torch operators run, and the host reads no
        value from the device.
        """
        lists = sent.lists()
        rows = lists["rows"]
        decode_rows = rows[: sent.lengths["rows"] - sent.lengths.get("final rows", 0)]
        seq_lens = self._table.lens.index_select(0, decode_rows)
        window_offsets = self._window_offsets[: self._window + forced_nodes]
        return Batch(
            rows=rows,
            decode_rows=decode_rows,
            seq_lens=seq_lens,
            window=self._table.slots(decode_rows[:, None], seq_lens[:, None] + window_offsets),
            sampling=self._sampling.take(rows, SamplingMode.RANDOM in mode, SamplingMode.FILTERED in mode),
            prompt=self._prompt(lists) if "tokens" in lists else self._empty_prompt,
            mode=mode,
            scored=lists.get("scored"),
            extend_mode=extend_mode,
        )

    def _prompt(self, lists: dict[str, Tensor]) -> PromptBatch:
        return PromptBatch(
            rows=lists["token rows"],
            token_ids=lists["tokens"],
            next_ids=lists["next"],
            positions=lists["positions"],
            write=self._table.slots(lists["token rows"], lists["positions"]),
            text=PromptRows(lists["chunk rows"], lists["starts"], lists["indptr"]),
            final_rows=lists["final rows"],
            final_lens=lists["final lens"],
        )


def _stage_writes(writes: Ordered[PageWrite], staging: Staging) -> None:
    """Stage two lists. The first has the rows that are cleared; these come first in `writes`. The second, `[3 n]`, is
    for the n other writes: first all their rows, then all their entries, then all their pages.
    """
    cleared = [write.row for write in writes if write.entry < 0]
    staging.add("cleared", cleared)
    staging.add("written", (number for column in zip(*writes[len(cleared) :], strict=True) for number in column))


def _stage_prompt(step_input: StepInput, staging: Staging, idle_row: int) -> None:
    """Stage the prompt chunks, with their padding. Some lists have one number per prompt row, some one per chunk
    (`indptr` has one more), and some one per prompt that ends in this step.
    """
    chunks, idle_finals = step_input.chunks, step_input.idle_finishing_prompts
    padding_chunks = max(0, step_input.padded_chunks - len(chunks))
    tokens: list[int] = []
    next_tokens: list[int] = []
    indptr = [0]
    final_rows: list[int] = []
    for chunk in chunks:
        tokens += chunk.tokens[: _row_count(chunk)]
        indptr.append(len(tokens))
        next_tokens += chunk.tokens[1:]
        if chunk.final:  # the next token is not known: extend inserts the one that the target chooses
            next_tokens.append(0)
            final_rows.append(len(tokens) - 1)
    staging.add("tokens", tokens)
    staging.add("next", next_tokens)
    staging.add("positions", (position for chunk in chunks for position in range(chunk.start, chunk.stop)))
    staging.add("token rows", (chunk.row for chunk in chunks for _ in range(_row_count(chunk))))
    # The padding entries of "final rows" point at prompt row 0, which is padding too: idle chunks come first.
    staging.add("final rows", final_rows + [0] * idle_finals)
    staging.add("final lens", [chunk.stop for chunk in chunks if chunk.final] + [0] * idle_finals)
    staging.add("indptr", indptr + [len(tokens)] * padding_chunks)  # chunks without rows
    staging.add("starts", [chunk.start for chunk in chunks] + [0] * padding_chunks)
    staging.add("chunk rows", [chunk.row for chunk in chunks] + [idle_row] * padding_chunks)


def _scored_row_indices(chunks: Iterable[PromptChunk]) -> Iterator[int]:
    """Yield the indices of the prompt rows that return log-probabilities: the first `scored` rows of each chunk."""
    start = 0
    for chunk in chunks:
        yield from range(start, start + chunk.scored)
        start += _row_count(chunk)


def _row_count(chunk: PromptChunk) -> int:
    return chunk.stop - chunk.start
