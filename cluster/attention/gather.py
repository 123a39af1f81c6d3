"""Turns `AttentionMetadata` into attention calls of the torch backend. A call has the cells (k and v by token) of
requests with the same number of rows, and a bias over these cells.

One `Gather` serves all models of a rank, as they share the page table. Results that several phases of a step need, such
as the slots of a request, are computed once per step.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.attention.bias import Visibility
from cluster.attention.cells import CellPiece, RequestCells
from cluster.batch import AttentionMetadata, HostBounds, PromptRows, TreeRows
from cluster.kv.page_table import PageTable, WindowTable

MAX_ROWS_IN_PIECES = 256
"""A request with more query rows per KV head than this is not read in pieces, because the scores of all pieces would be
in memory at once.
"""


@dataclass(frozen=True, slots=True)
class GatherSpec:
    """What `Gather` needs to know about a model's layers: the bytes of one token in one layer (`cell_bytes`), the
    query heads for each KV head (`heads_per_kv_head`), the `dtype` of biases, and the sliding `windows` of the layers
    (None: full attention).
    """

    cell_bytes: int
    heads_per_kv_head: int
    dtype: torch.dtype
    windows: Collection[int | None]

    def may_read_in_pieces(self, rows: int) -> bool:
        """Return whether a request of `rows` rows may be read in pieces. In half precision it may not, as the scores of
        pieces would be rounded more than those of a single call.
        """
        return self.heads_per_kv_head * rows <= MAX_ROWS_IN_PIECES and self.dtype in (torch.float32, torch.float64)


@dataclass(slots=True)
class AttentionCall:
    """One attention call: R requests with q rows each. `rows` are the indices of these rows in the batch: a slice if
    they are contiguous, else an index `[R * q]`.

    `pieces` hold the cells in order of position; with R > 1 there is one piece. `biases` maps a sliding window (None:
    no window) to a bias `[R or 1, q, c]` over the last c cells; all rows see the cells before these. A bias of None
    means that all rows see all cells. If requests with fewer rows are padded to q, `unpad_index` selects the real rows
    from the padded `[R * q]`, in batch order; otherwise it is None.
    """

    requests: int
    q_rows: int
    rows: slice | Tensor
    pieces: Sequence[CellPiece]
    biases: Mapping[int | None, Tensor | None]
    unpad_index: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Chunks:
    """Prompt chunks of similar lengths (`row_counts`, ascending), which may share an attention call. The first row of
    the first chunk is prompt row `first_row`.

    If their lengths differ, they are padded to the longest: `rows` and `unpad_index` are as in `AttentionCall`, with
    `rows` counted from prompt row 0. Otherwise both are None.
    """

    first_row: int
    row_counts: list[int]
    cells: RequestCells
    rows: Tensor | None = None
    unpad_index: Tensor | None = None

    def calls(self, first_prompt_row: int, first: int, spec: GatherSpec) -> list[AttentionCall]:
        """Return the calls for these chunks. Prompt rows begin at batch row `first_prompt_row`; `first` is as in
        `AttentionMetadata`.
        """
        cells, padded_rows = self.cells, self.row_counts[-1]
        if cells.reads_separately(padded_rows, spec.cell_bytes):
            return list(self._separate_calls(first_prompt_row + self.first_row, first, spec))
        visibility = Visibility.text(padded_rows, first, spec.dtype, cells.lens.device)
        biases = {sliding_window: padded_bias(visibility, cells, sliding_window) for sliding_window in spec.windows}
        first_row = first_prompt_row + self.first_row
        rows = (
            slice(first_row, first_row + padded_rows * len(self.row_counts))
            if self.rows is None
            else self.rows + first_prompt_row
        )
        return [
            AttentionCall(
                len(self.row_counts), padded_rows, rows, [gathered_piece(cells, padded_rows)], biases, self.unpad_index
            )
        ]

    def _separate_calls(self, first_row: int, first: int, spec: GatherSpec) -> Iterator[AttentionCall]:
        cells = self.cells
        for i, chunk_rows in enumerate(self.row_counts):
            visibility, request = Visibility.text(chunk_rows, first, spec.dtype, cells.lens.device), slice(i, i + 1)
            biases = {
                sliding_window: tail_bias(visibility, cells, request, sliding_window) for sliding_window in spec.windows
            }
            pieces = cells.pieces(i, chunk_rows, spec.cell_bytes, spec.may_read_in_pieces(chunk_rows))
            yield AttentionCall(1, chunk_rows, slice(first_row, first_row + chunk_rows), pieces, biases)
            first_row += chunk_rows


class Gather:
    """Makes the attention calls of a rank's forwards from its page table."""

    def __init__(self, table: PageTable | WindowTable, window: int) -> None:
        """`window` is the number of slots that a decoding request may write in a step without grammars."""
        self.table, self._window = table, window
        self.prepare(HostBounds())

    @property
    def device(self) -> torch.device:
        """The device of the page table; pools must be on the same one."""
        return self.table.device

    def prepare(self, bounds: HostBounds) -> None:
        """Begin a step within `bounds`, and drop what was computed from the lengths and pages of the last step."""
        self._bounds = bounds
        self._tree: tuple[TreeRows, RequestCells] | None = None
        self._text: tuple[PromptRows, list[Chunks]] | None = None

    def calls(self, metadata: AttentionMetadata, spec: GatherSpec) -> list[AttentionCall]:
        """Return the calls for the batch rows, in order of rows: first tree rows, then the rows of prompt chunks."""
        calls, num_rows = [], 0
        if metadata.tree is not None and metadata.tree.lens.shape[0]:
            calls += self._tree_calls(metadata.tree, metadata.first, spec)
            num_rows = metadata.tree.lens.shape[0] * metadata.tree.bits.shape[1]
        if metadata.text is not None:
            for chunks in self._chunks(metadata.text):
                calls += chunks.calls(num_rows, metadata.first, spec)
        return calls

    def _tree_calls(self, tree: TreeRows, first: int, spec: GatherSpec) -> list[AttentionCall]:
        # The same tensors mean the same requests, so draft levels, verify and extend share one `RequestCells`.
        if self._tree is None or self._tree[0].lens is not tree.lens or self._tree[0].rows is not tree.rows:
            window = self._window + self._bounds.forced_nodes
            self._tree = tree, RequestCells(self.table, tree.rows, tree.lens, self._bounds.max_seq_len, window)
        cells, num_requests, q_rows = self._tree[1], tree.lens.shape[0], tree.bits.shape[1]
        visibility = Visibility.of(tree.bits, tree.width, first, spec.dtype)
        if not cells.reads_separately(tree.width, spec.cell_bytes):
            shared_biases = {
                sliding_window: padded_bias(visibility, cells, sliding_window) for sliding_window in spec.windows
            }
            return [
                AttentionCall(
                    num_requests,
                    q_rows,
                    slice(0, num_requests * q_rows),
                    [gathered_piece(cells, tree.width)],
                    shared_biases,
                )
            ]
        biases = {
            sliding_window: tail_bias(visibility, cells, slice(0, num_requests), sliding_window)
            for sliding_window in spec.windows
        }
        calls = []
        for request in range(num_requests):
            pieces = cells.pieces(request, tree.width, spec.cell_bytes, spec.may_read_in_pieces(q_rows))
            request_biases = {sliding_window: bias_of_request(bias, request) for sliding_window, bias in biases.items()}
            calls.append(
                AttentionCall(1, q_rows, slice(request * q_rows, request * q_rows + q_rows), pieces, request_biases)
            )
        return calls

    def _chunks(self, text: PromptRows) -> list[Chunks]:
        if self._text is None or self._text[0] is not text:
            lengths = [stop - start for start, stop in self._bounds.chunks]
            self._text = (
                text,
                [self._padded(text, lengths, chunk_range) for chunk_range in similar_length_ranges(lengths)],
            )
        return self._text[1]

    def _padded(self, text: PromptRows, lengths: list[int], chunk_range: slice) -> Chunks:
        """Return the chunks at indices `chunk_range`, padded to the longest of them. `lengths` are the row counts of
        all chunks.
        """
        first_row, row_counts, padded_rows = (
            sum(lengths[: chunk_range.start]),
            lengths[chunk_range],
            lengths[chunk_range.stop - 1],
        )
        longest = max(start for start, _ in self._bounds.chunks[chunk_range])
        cell_arguments, device = (
            (self.table, text.rows[chunk_range], text.starts[chunk_range], longest, padded_rows),
            text.starts.device,
        )
        if row_counts[0] == padded_rows:
            return Chunks(first_row, row_counts, RequestCells(*cell_arguments))
        firsts = text.indptr[chunk_range]
        real_rows = text.indptr[chunk_range.start + 1 : chunk_range.stop + 1] - firsts
        row_offsets = torch.arange(padded_rows, device=device)
        # Padding rows repeat the chunk's row 0; `unpad_index` drops their results.
        rows = (firsts[:, None] + torch.where(row_offsets < real_rows[:, None], row_offsets, 0)).view(-1)
        # Real row k, of chunk i, is padded row i * padded_rows + (k - real rows before chunk i) = k + padding_shift[i].
        padding_shift = torch.arange(len(row_counts), device=device) * padded_rows - (firsts - first_row)
        unpad_index = torch.arange(sum(row_counts), device=device) + padding_shift.repeat_interleave(
            real_rows, output_size=sum(row_counts)
        )
        return Chunks(first_row, row_counts, RequestCells(*cell_arguments, real_rows), rows, unpad_index)


def similar_length_ranges(sorted_lengths: Sequence[int]) -> Iterator[slice]:
    """Split the lengths into ranges in which the largest length is at most twice the smallest; yield them as slices."""
    range_start = 0
    for range_end in range(1, len(sorted_lengths) + 1):
        if range_end == len(sorted_lengths) or sorted_lengths[range_end] > 2 * sorted_lengths[range_start]:
            yield slice(range_start, range_end)
            range_start = range_end


def gathered_piece(cells: RequestCells, width: int) -> CellPiece:
    """Return one piece with the committed tokens of all requests, padded to the longest, and `width` window slots. Its
    cells are copied.
    """
    slots = cells.slots(width)
    return CellPiece(slots.reshape(-1), slots.shape[1])


def padded_bias(visibility: Visibility, cells: RequestCells, sliding_window: int | None) -> Tensor:
    """Return the bias `[R, q, P + w]` over the cells of `gathered_piece`."""
    if visibility.limits_committed_tokens(sliding_window):
        return visibility.limited_bias(cells.labels(False), cells.lens, sliding_window)
    (_, q, width), padding_bias = visibility.bias.shape, cells.bias(visibility.bias.dtype)
    if visibility.all_visible:
        return padding_bias[..., : cells.longest + width]
    committed_bias = padding_bias[..., : cells.longest].expand(-1, q, -1)
    return torch.cat([committed_bias, visibility.bias.expand(committed_bias.shape[0], -1, -1)], 2)


def tail_bias(
    visibility: Visibility, cells: RequestCells, requests: slice, sliding_window: int | None
) -> Tensor | None:
    """Return the bias `[R or 1, q, c]` over the last c cells of each request in `requests`, for requests that are read
    one by one.

    All rows see the cells before the last c. If the result is None, all rows see all cells.
    """
    if visibility.limits_committed_tokens(sliding_window):
        return visibility.limited_bias(cells.labels(True)[requests], cells.lens[requests], sliding_window)
    return None if visibility.all_visible else visibility.bias


def bias_of_request(bias: Tensor | None, request: int) -> Tensor | None:
    """Return the bias `[1, q, c]` of one request. `bias` is `[R, q, c]`, or `[1, q, c]` if all requests share it."""
    return bias if bias is None or bias.shape[0] == 1 else bias[request : request + 1]
