"""Finds the cells of requests by the page table: as slot numbers or, on a CPU, also as slices of the pool. A cell is
the K and V of one token in one layer; a slot is its place in the pool.

Pages are allocated lowest first, so a long prompt is mostly one run of consecutive slots, which attention can read in
place. On a CPU the host looks at the page table to find such runs. On a GPU the host would have to wait for the table,
so cells on a GPU are always gathered by index.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.attention.bias import MASKED
from cluster.kv.page_table import PageTable, WindowTable

READ_SEPARATELY_BYTES = 1 << 24
"""If the cells of all requests have this many bytes or more in one layer, requests are read one by one. Fewer bytes are
copied together: the copy stays in the CPU's caches, and one call is faster than many. From 32 MB on, the copy alone
takes four times as long as attention, because each call then gets new memory from the operating system.
"""
READ_IN_PIECES_BYTES = 1 << 22
"""A request whose cells are in several runs of slots, and have this many bytes or more in one layer, is read in pieces;
with fewer bytes, it is copied.
"""
READ_IN_PLACE_BYTES = 1 << 18
"""A run of slots with this many bytes or more is read in place, as a piece. Shorter runs are copied together with their
neighbours, which costs less than separate matrix products."""


class CellPiece(NamedTuple):
    """A piece: `length` cells of each of R requests, in order of position. `slots` is a slice of the pool's slots (only
    if R is 1), or the slot numbers `[R * length]`.
    """

    slots: slice | Tensor
    length: int


def host_values(tensor: Tensor) -> list[Any] | None:
    """Return the values of a tensor of lengths or pages; None if it is on a GPU, where reading would wait.

    This is the only place where attention reads tensors on the host.
    """
    return tensor.tolist() if tensor.is_cpu else None


class RequestCells:
    """The cells of R >= 1 requests: their committed tokens, and up to `max_window_slots` window slots after them, which
    the rows of the current step write.

    `lens` `[R]` tokens are committed, at most `longest`. If the requests are read together, shorter ones are padded:
    the padding reads the request's own first window slot, and is masked. That slot is always written before it is read.
    A request must not read memory of other requests even if masked, because a weight of 0 does not remove NaN (0 * NaN
    = NaN). `written_slots` `[R]` is the number of window slots of each request that are written; the slots after these
    are not read. If it is None, all are written.
    """

    def __init__(
        self,
        table: PageTable | WindowTable,
        rows: Tensor,
        lens: Tensor,
        longest: int,
        max_window_slots: int,
        written_slots: Tensor | None = None,
    ) -> None:
        self.rows, self.lens = rows, lens
        self._table, self._max_window_slots, self._written_slots = table, max_window_slots, written_slots
        self.host_lens: list[int] | None = host_values(lens)
        self.longest = min(longest, table.length) if self.host_lens is None else max(self.host_lens)
        self._pages: list[list[int]] | None = None
        self._is_padding: Tensor | None = None
        self._slots: Tensor | None = None
        self._bias: Tensor | None = None
        self._pieces: dict[tuple[int, int, int, bool], list[CellPiece]] = {}

    def reads_separately(self, width: int, cell_bytes: int) -> bool:
        """Return whether requests of `width` window slots should be read one by one, not copied together. A token has
        `cell_bytes` bytes.
        """
        if self.host_lens is None:
            return False
        return (
            len(self.host_lens) == 1
            or len(self.host_lens) * (self.longest + width) * cell_bytes >= READ_SEPARATELY_BYTES
        )

    def slots(self, width: int) -> Tensor:
        """Return the slots `[R, P + width]`: committed tokens padded to P = `longest`, then `width` window slots."""
        if self._slots is None:
            window_offsets = torch.arange(self._max_window_slots, device=self.lens.device)
            all_slots = self._table.first_slots(self.rows, self.longest + self._max_window_slots)
            # Window slot j of request r is at position lens[r] + j. Padding becomes the request's first window slot.
            window = all_slots.gather(1, (self.lens[:, None] + window_offsets).clamp_(max=all_slots.shape[1] - 1))
            if self._written_slots is not None:
                window = torch.where(window_offsets < self._written_slots[:, None], window, window[:, :1])
            prefix = torch.where(self.is_padding, window[:, :1], all_slots[:, : self.longest])
            self._slots = torch.cat([prefix, window], 1)
        return self._slots[:, : self.longest + width]

    @property
    def is_padding(self) -> Tensor:
        """The mask `[R, P]` of padding: positions at or after a request's committed length."""
        if self._is_padding is None:
            self._is_padding = torch.arange(self.longest, device=self.lens.device) >= self.lens[:, None]
        return self._is_padding

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Return the bias `[R, 1, P + max_window_slots]` that masks only the padding."""
        if self._bias is None:
            shape = (*self.lens.shape, 1, self.longest + self._max_window_slots)
            self._bias = torch.zeros(shape, dtype=dtype, device=self.lens.device)
            self._bias[:, 0, : self.longest].masked_fill_(self.is_padding, MASKED)
        return self._bias

    def labels(self, pad_front: bool) -> Tensor:
        """Return the positions `[R, P]` of the committed tokens, padded with -1 to P.

        The padding is at the end, as in `slots`, or at the front if `pad_front`. The front is for requests that are
        read one by one: the L cells of a request then match the last L columns of the bias, which has P + w columns for
        w window slots.
        """
        positions = torch.arange(self.longest, device=self.lens.device)
        if pad_front:
            return (positions + (self.lens[:, None] - self.longest)).clamp_(min=-1)
        return positions.masked_fill(self.is_padding, -1)

    def pieces(self, request: int, width: int, cell_bytes: int, allow_several: bool) -> list[CellPiece]:
        """Return the pieces of one request, number `request`: its committed tokens, then `width` window slots.

        A token has `cell_bytes` bytes. If all cells are in one run of consecutive slots, there is one piece, a slice.
        If they are in several runs, there is usually one piece, which is copied. But if `allow_several` is True and the
        cells have `READ_IN_PIECES_BYTES` bytes or more, each run of `READ_IN_PLACE_BYTES` bytes or more is a piece of
        its own, a slice, and the cells between these runs are pieces that are copied.
        """
        assert self.host_lens is not None
        key = (request, width, cell_bytes, allow_several)
        if key in self._pieces:
            return self._pieces[key]
        if self._pages is None:
            max_pages = -(-(self.longest + self._max_window_slots) // self._table.page_size)
            self._pages = host_values(self._table.pages_of(self.rows, max_pages))
            assert self._pages is not None
        page_size, count = self._table.page_size, self.host_lens[request] + width
        min_slots = (
            -(-READ_IN_PLACE_BYTES // cell_bytes)
            if allow_several and count * cell_bytes >= READ_IN_PIECES_BYTES
            else None
        )
        self._pieces[key] = pieces = []
        for first, last, start in slot_spans(self._pages[request][: -(-count // page_size)], page_size, min_slots):
            length = min(last, count) - first
            if start is None:
                slots = self._table.first_slots(self.rows[request : request + 1], count)[0, first : first + length]
                pieces.append(CellPiece(slots, length))
            else:
                pieces.append(CellPiece(slice(start, start + length), length))
        return pieces


class Span(NamedTuple):
    """Positions `first` to `last - 1` of a request. They are in consecutive slots from `start` on. If `start` is None,
    their slots need not be consecutive.
    """

    first: int
    last: int
    start: int | None


def slot_spans(pages: Sequence[int], page_size: int, min_slots: int | None) -> Iterator[Span]:
    """Divide a request's `pages`, of `page_size` tokens each, into spans, and yield these in order. Each run of at
    least `min_slots` consecutive slots is a span, and so are the pages between two such runs.

    If `min_slots` is None, all pages are one span. If all pages are consecutive, the one span has a `start`.
    """
    # Indices at which a run of consecutive page numbers ends.
    run_ends = [index for index, (page, next_page) in enumerate(pairwise(pages), 1) if next_page != page + 1]
    run_ends.append(len(pages))
    pending_start = run_start = 0  # pages before `pending_start` are already in a yielded span
    for run_end in run_ends:
        if len(run_ends) == 1 or (min_slots is not None and (run_end - run_start) * page_size >= min_slots):
            if pending_start < run_start:
                yield Span(pending_start * page_size, run_start * page_size, None)
            yield Span(run_start * page_size, run_end * page_size, pages[run_start] * page_size)
            pending_start = run_end
        run_start = run_end
    if pending_start < len(pages):
        yield Span(pending_start * page_size, len(pages) * page_size, None)
