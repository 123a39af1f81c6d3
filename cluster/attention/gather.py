"""From what attention is told to what the torch twin reads: cells, and a bias over them, in parts of equal rows.

One `Gather` serves all runners of a rank, as they share the page table: what a step's phases have in common is made
once a step.
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
"""Query rows of a kv head with which a request may be read in several pieces: their scores are all kept at once."""


@dataclass(frozen=True, slots=True)
class GatherSpec:
    """What reads: `cell` bytes a token in one layer, `repeat` query heads on each kv head, in the dtype of its biases.
    `windows` are the sliding windows that occur, None for full attention.
    """

    cell: int
    repeat: int
    dtype: torch.dtype
    windows: Collection[int | None]

    def may_part(self, rows: int) -> bool:
        """Whether a request of so many rows may be read in pieces: half precision would lose some in the scores."""
        return self.repeat * rows <= MOST_ROWS and self.dtype in (torch.float32, torch.float64)


@dataclass(slots=True)
class AttentionCall:
    """R requests with q rows each that are attended in one call. `rows` are batch rows: a slice where they lie
    together, else an index `[R * q]`.

    `pieces` are read one after the other; if R > 1 it is one. `biases` by sliding window are `[R or 1, q, c]`, over the
    last c cells; all cells before them are seen, or all if it is None. `back`, when set, picks the real rows out of the
    padded `[R * q]` ones, in batch order.
    """

    requests: int
    q_rows: int
    rows: slice | Tensor
    pieces: Sequence[CellPiece]
    biases: Mapping[int | None, Tensor | None]
    back: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Chunks:
    """Prompt chunks in order of length, of `counts` rows each, from row `begin` of the text on.

    If they are not all of one length, `rows` and `back` are those of `AttentionCall`, from the text's row 0.
    """

    begin: int
    counts: list[int]
    cells: RequestCells
    rows: Tensor | None = None
    back: Tensor | None = None

    def parts(self, at: int, first: int, reader: GatherSpec) -> list[AttentionCall]:
        """Their parts, in a batch where the text begins at row `at`; `first` as in `AttentionMetadata`."""
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
    """Makes parts, by the page table of a rank."""

    def __init__(self, table: PageTable, window: int) -> None:
        """`window` are the slots that a decoding request may write in a step where nothing is forced."""
        self.table, self._window = table, window
        self.prepare(HostBounds())

    @property
    def device(self) -> torch.device:
        """Where the page table lies, and so must pools."""
        return self.table.device_pages.device

    def prepare(self, bounds: HostBounds) -> None:
        """A step begins: its bounds are these, and lengths and pages are others than before."""
        self._bounds = bounds
        self._tree: tuple[TreeRows, RequestCells] | None = None
        self._text: tuple[PromptRows, list[Chunks]] | None = None

    def parts(self, seen: AttentionMetadata, reader: GatherSpec) -> list[AttentionCall]:
        """The parts that cover the batch rows in order."""
        parts, rows = [], 0
        if seen.tree is not None and seen.tree.lens.shape[0]:
            parts += self._of_tree(seen.tree, seen.first, reader)
            rows = seen.tree.lens.shape[0] * seen.tree.bits.shape[1]
        if seen.text is not None:
            for chunks in self._chunks(seen.text):
                parts += chunks.parts(rows, seen.first, reader)
        return parts

    def _of_tree(self, tree: TreeRows, first: int, reader: GatherSpec) -> list[AttentionCall]:
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
        """The chunks of one part, which have `lengths` rows."""
        begin, counts, q = sum(lengths[: part.start]), lengths[part], lengths[part.stop - 1]
        longest = max(start for start, _ in self._bounds.chunks[part])
        given, device = (self.table, text.rows[part], text.starts[part], longest, q), text.starts.device
        if counts[0] == q:
            return Chunks(begin, counts, RequestCells(*given))
        firsts = text.indptr[part]
        real = text.indptr[part.start + 1 : part.stop + 1] - firsts
        row = torch.arange(q, device=device)
        rows = (firsts[:, None] + torch.where(row < real[:, None], row, 0)).view(-1)
        ahead = torch.arange(len(counts), device=device) * q - (firsts - begin)  # of real rows among the padded ones
        back = torch.arange(sum(counts), device=device) + ahead.repeat_interleave(real, output_size=sum(counts))
        return Chunks(begin, counts, RequestCells(*given, real), rows, back)


def alike(lengths: Sequence[int]) -> Iterator[slice]:
    """Runs of chunks, which are in order of length, whose longest is at most twice the shortest."""
    begin = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or lengths[end] > 2 * lengths[begin]:
            yield slice(begin, end)
            begin = end


def copied(cells: RequestCells, width: int) -> CellPiece:
    """All requests' committed tokens, padded, and `width` slots after them: one copy."""
    slots = cells.slots(width)
    return CellPiece(slots.reshape(-1), slots.shape[1])


def over(sight: Visibility, cells: RequestCells, sliding_window: int | None) -> Tensor:
    """The bias `[R, q, P + w]` over `copied`."""
    if sight.narrows(sliding_window):
        return sight.narrowed(cells.labels(False), cells.lens, sliding_window)
    (_, q, width), whole = sight.bias.shape, cells.bias(sight.bias.dtype)
    if sight.whole:
        return whole[..., : cells.longest + width]
    seen = whole[..., : cells.longest].expand(-1, q, -1)
    return torch.cat([seen, sight.bias.expand(seen.shape[0], -1, -1)], 2)


def behind(sight: Visibility, cells: RequestCells, requests: slice, sliding_window: int | None) -> Tensor | None:
    """The bias `[R or 1, q, c]` over the last c cells of `requests` read one by one; they see all before. None: all."""
    if sight.narrows(sliding_window):
        return sight.narrowed(cells.labels(True)[requests], cells.lens[requests], sliding_window)
    return None if sight.whole else sight.bias


def of_request(bias: Tensor | None, request: int) -> Tensor | None:
    """The bias `[1, q, c]` of one request out of those of all, `[R, q, c]`, or `[1, q, c]` if they are the same."""
    return bias if bias is None or bias.shape[0] == 1 else bias[request : request + 1]
