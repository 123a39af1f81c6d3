"""Turns `AttentionMetadata` into calls of the torch backend. A call has the cells of requests with the same number of
rows, and a bias over these cells.

One `Gather` serves all runners of a rank, as they share the page table. What the phases of a step have in common is
computed once a step.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.attention.bias import Visibility
from cluster.attention.cells import CellPiece, RequestCells
from cluster.batch import AttentionMetadata, HostBounds, PromptRows, TreeRows
from cluster.kv.page_table import PageTable

MOST_ROWS = 256
"""A request with more query rows per KV head is not read in pieces, because then all scores are in memory at once."""


@dataclass(frozen=True, slots=True)
class GatherSpec:
    """Facts about a runner's layers: `cell` bytes of a token in one layer, `repeat` query heads for each KV head, the
    `dtype` of biases, and the sliding `windows` that occur (None: full attention).
    """

    cell: int
    repeat: int
    dtype: torch.dtype
    windows: Collection[int | None]

    def may_part(self, rows: int) -> bool:
        """Return whether a request of `rows` rows may be read in pieces. Not in half precision, where the scores of
        pieces would be rounded more than those of a single call.
        """
        return self.repeat * rows <= MOST_ROWS and self.dtype in (torch.float32, torch.float64)


@dataclass(slots=True)
class AttentionCall:
    """One attention call: R requests with q rows each. `rows` are their batch rows: a slice if contiguous, else an
    index `[R * q]`.

    `pieces` hold the cells in order of position; with R > 1 there is one piece. `biases` maps a sliding window to a
    bias `[R or 1, q, c]` over the last c cells; all rows see the cells before these. A bias of None means that all rows
    see all cells. If `back` is set, it selects the real rows out of the padded `[R * q]`, in batch order.
    """

    requests: int
    q_rows: int
    rows: slice | Tensor
    pieces: Sequence[CellPiece]
    biases: Mapping[int | None, Tensor | None]
    back: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Chunks:
    """Prompt chunks of `counts` rows, sorted by length, that are attended together. They start at prompt row `begin`.

    If their lengths differ, they are padded to the longest: `rows` and `back` are as in `AttentionCall`, with `rows`
    counted from prompt row 0.
    """

    begin: int
    counts: list[int]
    cells: RequestCells
    rows: Tensor | None = None
    back: Tensor | None = None

    def parts(self, at: int, first: int, reader: GatherSpec) -> list[AttentionCall]:
        """Return the calls for these chunks. Prompt rows begin at batch row `at`; `first`: see `AttentionMetadata`."""
        cells, q = self.cells, self.counts[-1]
        if cells.apart(q, reader.cell):
            return list(self._apart(at + self.begin, first, reader))
        sight = Visibility.text(q, first, reader.dtype, cells.lens.device)
        biases = {width: over(sight, cells, width) for width in reader.windows}
        begin = at + self.begin
        rows = slice(begin, begin + q * len(self.counts)) if self.rows is None else self.rows + at
        return [AttentionCall(len(self.counts), q, rows, [copied(cells, q)], biases, self.back)]

    def _apart(self, begin: int, first: int, reader: GatherSpec) -> Iterator[AttentionCall]:
        cells = self.cells
        for i, q in enumerate(self.counts):
            sight, own = Visibility.text(q, first, reader.dtype, cells.lens.device), slice(i, i + 1)
            biases = {width: behind(sight, cells, own, width) for width in reader.windows}
            pieces = cells.pieces(i, q, reader.cell, reader.may_part(q))
            yield AttentionCall(1, q, slice(begin, begin + q), pieces, biases)
            begin += q


class Gather:
    """Makes the attention calls of a rank's forwards from its page table."""

    def __init__(self, table: PageTable, window: int) -> None:
        """`window`: slots that a decoding request may write in a step without forced tokens."""
        self.table, self._window = table, window
        self.prepare(HostBounds())

    @property
    def device(self) -> torch.device:
        """The device of the page table; pools must be on the same one."""
        return self.table.device_pages.device

    def prepare(self, bounds: HostBounds) -> None:
        """Begin a step with these bounds, and drop what was computed from the last step's lengths and pages."""
        self._bounds = bounds
        self._tree: tuple[TreeRows, RequestCells] | None = None
        self._text: tuple[PromptRows, list[Chunks]] | None = None

    def parts(self, seen: AttentionMetadata, reader: GatherSpec) -> list[AttentionCall]:
        """Return the calls that cover the batch rows in order: those of the tree, then those of prompt chunks."""
        parts, rows = [], 0
        if seen.tree is not None and seen.tree.lens.shape[0]:
            parts += self._of_tree(seen.tree, seen.first, reader)
            rows = seen.tree.lens.shape[0] * seen.tree.bits.shape[1]
        if seen.text is not None:
            for chunks in self._chunks(seen.text):
                parts += chunks.parts(rows, seen.first, reader)
        return parts

    def _of_tree(self, tree: TreeRows, first: int, reader: GatherSpec) -> list[AttentionCall]:
        # The same tensors mean the same requests, so draft levels, verify and extend share one `RequestCells`.
        if self._tree is None or self._tree[0].lens is not tree.lens or self._tree[0].rows is not tree.rows:
            window = self._window + self._bounds.forced
            self._tree = tree, RequestCells(self.table, tree.rows, tree.lens, self._bounds.longest, window)
        cells, r, q = self._tree[1], tree.lens.shape[0], tree.bits.shape[1]
        sight = Visibility.of(tree.bits, tree.width, first, reader.dtype)
        if not cells.apart(tree.width, reader.cell):
            together = {width: over(sight, cells, width) for width in reader.windows}
            return [AttentionCall(r, q, slice(0, r * q), [copied(cells, tree.width)], together)]
        biases = {width: behind(sight, cells, slice(0, r), width) for width in reader.windows}
        parts = []
        for i in range(r):
            pieces = cells.pieces(i, tree.width, reader.cell, reader.may_part(q))
            own = {width: of_request(bias, i) for width, bias in biases.items()}
            parts.append(AttentionCall(1, q, slice(i * q, i * q + q), pieces, own))
        return parts

    def _chunks(self, text: PromptRows) -> list[Chunks]:
        if self._text is None or self._text[0] is not text:
            lengths = [stop - start for start, stop in self._bounds.chunks]
            self._text = text, [self._padded(text, lengths, part) for part in alike(lengths)]
        return self._text[1]

    def _padded(self, text: PromptRows, lengths: list[int], part: slice) -> Chunks:
        """Return the chunks at indices `part`, padded to the longest. `lengths` are the row counts of all chunks."""
        begin, counts, q = sum(lengths[: part.start]), lengths[part], lengths[part.stop - 1]
        longest = max(start for start, _ in self._bounds.chunks[part])
        given, device = (self.table, text.rows[part], text.starts[part], longest, q), text.starts.device
        if counts[0] == q:
            return Chunks(begin, counts, RequestCells(*given))
        firsts = text.indptr[part]
        real = text.indptr[part.start + 1 : part.stop + 1] - firsts
        row = torch.arange(q, device=device)
        # Padding rows repeat the chunk's row 0; `back` drops their results.
        rows = (firsts[:, None] + torch.where(row < real[:, None], row, 0)).view(-1)
        # Real row k of chunk i is padded row i * q + (k - real rows before chunk i) = k + ahead[i].
        ahead = torch.arange(len(counts), device=device) * q - (firsts - begin)
        back = torch.arange(sum(counts), device=device) + ahead.repeat_interleave(real, output_size=sum(counts))
        return Chunks(begin, counts, RequestCells(*given, real), rows, back)


def alike(lengths: Sequence[int]) -> Iterator[slice]:
    """Split chunks, sorted by length, into runs whose longest chunk is at most twice the shortest; yield the slices."""
    begin = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or lengths[end] > 2 * lengths[begin]:
            yield slice(begin, end)
            begin = end


def copied(cells: RequestCells, width: int) -> CellPiece:
    """Return one piece that copies all requests' committed tokens, padded, and `width` window slots."""
    slots = cells.slots(width)
    return CellPiece(slots.reshape(-1), slots.shape[1])


def over(sight: Visibility, cells: RequestCells, sliding_window: int | None) -> Tensor:
    """Return the bias `[R, q, P + w]` over the cells of `copied`."""
    if sight.narrows(sliding_window):
        return sight.narrowed(cells.labels(False), cells.lens, sliding_window)
    (_, q, width), whole = sight.bias.shape, cells.bias(sight.bias.dtype)
    if sight.whole:
        return whole[..., : cells.longest + width]
    seen = whole[..., : cells.longest].expand(-1, q, -1)
    return torch.cat([seen, sight.bias.expand(seen.shape[0], -1, -1)], 2)


def behind(sight: Visibility, cells: RequestCells, requests: slice, sliding_window: int | None) -> Tensor | None:
    """Return the bias `[R or 1, q, c]` over the last c cells of each request in `requests`, for reading one by one.

    All rows see the cells before these. Returns None if all rows see all cells.
    """
    if sight.narrows(sliding_window):
        return sight.narrowed(cells.labels(True)[requests], cells.lens[requests], sliding_window)
    return None if sight.whole else sight.bias


def of_request(bias: Tensor | None, request: int) -> Tensor | None:
    """Return the bias `[1, q, c]` of one request. `bias` is `[R, q, c]`, or `[1, q, c]` if all requests share it."""
    return bias if bias is None or bias.shape[0] == 1 else bias[request : request + 1]
