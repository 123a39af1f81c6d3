"""Where the cells of some requests lie, from the page table: as slots for an index, or on a CPU as slices of the pool.

Pages are handed out lowest first, so a long prompt mostly lies in one run of consecutive slots, which attention can
read where it lies. On a CPU that is worth a look at the table; a GPU would have to wait for it, and gathers always.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.attention.bias import MASKED
from cluster.kv.page_table import PageTable

LARGE = 1 << 24
"""Bytes of one layer from which on requests are read one by one. A smaller copy of all of them stays in a processor's
caches, and one call is faster than many. From 32 MB on the copy alone takes four times as long as attention: every
call then gets its memory anew from the system."""
LONG = 1 << 22
"""Bytes of one layer from which on a request that does not lie in one run is read in pieces, not copied."""
RUN = 1 << 18
"""Bytes of one layer from which on a run of slots is a piece of its own. A smaller one is copied together with what
lies about it, which costs less than products of its own."""


class CellPiece(NamedTuple):
    """`length` cells of each of some requests, in order of position: a slice of the pool, or slots `[R * length]`."""

    read: slice | Tensor
    length: int


def look(numbers: Tensor) -> list[Any] | None:
    """On a CPU, what lengths or pages `numbers` are; None on a GPU. The only place where attention asks the device."""
    return numbers.tolist() if numbers.is_cpu else None


class RequestCells:
    """The cells of R >= 1 requests: of their committed tokens, and of `more` slots after them.

    `lens` `[R]` tokens are committed, at most `longest`. Beyond its own count a request reads its own first slot after
    them, masked, which is written before it is read. It never reads memory of others, for which a bias would not be
    enough, as 0 * NaN is NaN. Of the slots after them the first `written` `[R]` are read, all if that is None.
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
        """Whether requests are better read one by one, with `width` slots after them and `cell` bytes a token."""
        if self.counts is None:
            return False
        return len(self.counts) == 1 or len(self.counts) * (self.longest + width) * cell >= LARGE

    def slots(self, width: int) -> Tensor:
        """The slots `[R, P + width]` of the committed tokens, padded to P, then of `width` after them."""
        if self._slots is None:
            after = torch.arange(self._more, device=self.lens.device)
            found = self._table.first_slots(self.rows, self.longest + self._more)
            window = found.gather(1, (self.lens[:, None] + after).clamp_(max=found.shape[1] - 1))
            if self._written is not None:
                window = torch.where(after < self._written[:, None], window, window[:, :1])
            prefix = torch.where(self.beyond, window[:, :1], found[:, : self.longest])
            self._slots = torch.cat([prefix, window], 1)
        return self._slots[:, : self.longest + width]

    @property
    def beyond(self) -> Tensor:
        """Which of the positions `[R, P]` from 0 on hold no committed token."""
        if self._beyond is None:
            self._beyond = torch.arange(self.longest, device=self.lens.device) >= self.lens[:, None]
        return self._beyond

    def bias(self, dtype: torch.dtype) -> Tensor:
        """The bias `[R, 1, P + W]` of rows that see all committed tokens and the whole window."""
        if self._bias is None:
            shape = (*self.lens.shape, 1, self.longest + self._more)
            self._bias = torch.zeros(shape, dtype=dtype, device=self.lens.device)
            self._bias[:, 0, : self.longest].masked_fill_(self.beyond, MASKED)
        return self._bias

    def labels(self, apart: bool) -> Tensor:
        """The position `[R, P]` of each committed token, padded with -1 to P: at the end, or at the front if requests
        are read one by one, so that the last of a row's cells are one request's own.
        """
        number = torch.arange(self.longest, device=self.lens.device)
        if apart:
            return (number + (self.lens[:, None] - self.longest)).clamp_(min=-1)
        return number.masked_fill(self.beyond, -1)

    def pieces(self, at: int, width: int, cell: int, several: bool) -> list[CellPiece]:
        """How request `at` is read alone: its committed tokens and `width` slots after them, `cell` bytes a token.

        A single run is a slice. Otherwise, if the request is `LONG` and `several` pieces may be, each `RUN` is a slice,
        and what lies between them is copied.
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
    """Positions `first` to `last - 1` of a request, which lie in the slots from `start` on; None: in no order."""

    first: int
    last: int
    start: int | None


def spans_of(pages: Sequence[int], size: int, least: int | None) -> Iterator[Span]:
    """What lies in `pages` of `size`: runs of `least` slots or more (None: of all), and what is between them."""
    ends = [at for at, (page, after) in enumerate(pairwise(pages), 1) if after != page + 1]
    ends.append(len(pages))
    loose = begin = 0  # pages before `loose` are in a span
    for end in ends:
        if len(ends) == 1 or (least is not None and (end - begin) * size >= least):
            if loose < begin:
                yield Span(loose * size, begin * size, None)
            yield Span(begin * size, end * size, pages[begin] * size)
            loose = end
        begin = end
    if loose < len(pages):
        yield Span(loose * size, len(pages) * size, None)
