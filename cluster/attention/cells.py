"""Locations of the cells of some requests, from the page table: slots for an index or, on a CPU, slices of the pool.

Pages are allocated lowest first, so a long prompt is mostly one run of consecutive slots, which attention can read in
place. On a CPU it pays to look at the page table to find such runs. On a GPU the host would have to wait for the table,
so there cells are always gathered by index.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.attention.bias import MASKED
from cluster.kv.page_table import PageTable

LARGE = 1 << 24
"""If the cells of all requests have this many bytes or more in one layer, requests are read one by one. A smaller copy
of all requests stays in the CPU's caches, and one call is faster than many. From 32 MB on, the copy alone takes four
times as long as attention, because each call then gets new memory from the operating system."""
LONG = 1 << 22
"""A request of several runs with this many bytes or more in one layer is read in pieces instead of copied."""
RUN = 1 << 18
"""A run of slots with this many bytes or more is read in place, as a piece. Shorter runs are copied together with their
neighbours, which costs less than separate matrix products."""


class CellPiece(NamedTuple):
    """`length` cells of each of R requests in order of position. `read` is a pool slice (only if R is 1), or the slots
    `[R * length]`.
    """

    read: slice | Tensor
    length: int


def look(numbers: Tensor) -> list[Any] | None:
    """Return the values of a tensor of lengths or pages; None if it is on a GPU, where reading would wait.

    This is the only place where attention reads tensors on the host.
    """
    return numbers.tolist() if numbers.is_cpu else None


class RequestCells:
    """The cells of R >= 1 requests: their committed tokens, and up to `more` window slots after them.

    `lens` `[R]` tokens are committed, at most `longest`. Padding beyond a request's own length reads the request's own
    first window slot, masked. That slot is always written before it is read. A request must not read memory of other
    requests even if masked, because a weight of 0 does not remove NaN (0 * NaN = NaN). `written` `[R]` is the number of
    window slots of each request that are written; slots after these are not read. If it is None, all are written.
    """

    def __init__(
        self, table: PageTable, rows: Tensor, lens: Tensor, longest: int, more: int, written: Tensor | None = None
    ) -> None:
        self.rows, self.lens = rows, lens
        self._table, self._more, self._written = table, more, written
        self.counts: list[int] | None = look(lens)
        self.longest = min(longest, table.length) if self.counts is None else max(self.counts)
        self._pages: list[list[int]] | None = None
        self._beyond: Tensor | None = None
        self._slots: Tensor | None = None
        self._bias: Tensor | None = None
        self._pieces: dict[tuple[int, int, int, bool], list[CellPiece]] = {}

    def apart(self, width: int, cell: int) -> bool:
        """Return whether requests of `width` window slots and `cell` bytes per token should be read one by one."""
        if self.counts is None:
            return False
        return len(self.counts) == 1 or len(self.counts) * (self.longest + width) * cell >= LARGE

    def slots(self, width: int) -> Tensor:
        """Return the slots `[R, P + width]`: committed tokens padded to P = `longest`, then `width` window slots."""
        if self._slots is None:
            after = torch.arange(self._more, device=self.lens.device)
            found = self._table.first_slots(self.rows, self.longest + self._more)
            # Window slot j of request r is at position lens[r] + j. Padding becomes the request's first window slot.
            window = found.gather(1, (self.lens[:, None] + after).clamp_(max=found.shape[1] - 1))
            if self._written is not None:
                window = torch.where(after < self._written[:, None], window, window[:, :1])
            prefix = torch.where(self.beyond, window[:, :1], found[:, : self.longest])
            self._slots = torch.cat([prefix, window], 1)
        return self._slots[:, : self.longest + width]

    @property
    def beyond(self) -> Tensor:
        """The mask `[R, P]` of padding: positions at or after a request's committed length."""
        if self._beyond is None:
            self._beyond = torch.arange(self.longest, device=self.lens.device) >= self.lens[:, None]
        return self._beyond

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Return the bias `[R, 1, P + more]` that masks only the padding."""
        if self._bias is None:
            shape = (*self.lens.shape, 1, self.longest + self._more)
            self._bias = torch.zeros(shape, dtype=dtype, device=self.lens.device)
            self._bias[:, 0, : self.longest].masked_fill_(self.beyond, MASKED)
        return self._bias

    def labels(self, apart: bool) -> Tensor:
        """Return the positions `[R, P]` of the committed tokens, padded with -1 to P.

        The padding is at the end, as in `slots`. If requests are read one by one (`apart`), the padding is at the
        front, so that a read of L < P + w cells matches the last L columns of the bias.
        """
        number = torch.arange(self.longest, device=self.lens.device)
        if apart:
            return (number + (self.lens[:, None] - self.longest)).clamp_(min=-1)
        return number.masked_fill(self.beyond, -1)

    def pieces(self, at: int, width: int, cell: int, several: bool) -> list[CellPiece]:
        """Return the pieces by which request `at` is read alone: committed tokens, then `width` window slots.

        A token has `cell` bytes. A request in one run is one slice. A request of several runs is copied as one piece,
        unless it has `LONG` bytes or more and `several` pieces are allowed. Then each run of `RUN` bytes or more is a
        slice, and the cells between these runs are copied.
        """
        assert self.counts is not None
        key = (at, width, cell, several)
        if key in self._pieces:
            return self._pieces[key]
        if self._pages is None:
            most = -(-(self.longest + self._more) // self._table.page_size)
            self._pages = look(self._table.device_pages.index_select(0, self.rows)[:, :most])
            assert self._pages is not None
        size, count = self._table.page_size, self.counts[at] + width
        least = -(-RUN // cell) if several and count * cell >= LONG else None
        self._pieces[key] = pieces = []
        for first, last, start in spans_of(self._pages[at][: -(-count // size)], size, least):
            length = min(last, count) - first
            if start is None:
                read = self._table.first_slots(self.rows[at : at + 1], count)[0, first : first + length]
                pieces.append(CellPiece(read, length))
            else:
                pieces.append(CellPiece(slice(start, start + length), length))
        return pieces


class Span(NamedTuple):
    """Positions `first` to `last - 1` of a request. They are in consecutive slots from `start` on; if `start` is None,
    the slots are not consecutive.
    """

    first: int
    last: int
    start: int | None


def spans_of(pages: Sequence[int], size: int, least: int | None) -> Iterator[Span]:
    """Yield the runs of at least `least` slots in `pages` of `size` tokens, and the spans between them, in order.

    If `least` is None, yield all pages as one span. It has a start only if all pages are consecutive.
    """
    # Indices at which a run of consecutive page numbers ends.
    ends = [at for at, (page, after) in enumerate(pairwise(pages), 1) if after != page + 1]
    ends.append(len(pages))
    loose = begin = 0  # pages before `loose` are already in a yielded span
    for end in ends:
        if len(ends) == 1 or (least is not None and (end - begin) * size >= least):
            if loose < begin:
                yield Span(loose * size, begin * size, None)
            yield Span(begin * size, end * size, pages[begin] * size)
            loose = end
        begin = end
    if loose < len(pages):
        yield Span(loose * size, len(pages) * size, None)
