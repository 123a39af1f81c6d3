"""Where the cells of some requests lie, from the page table: as slots for an index, or on a CPU as slices of the pool.

Pages are handed out lowest first, so a long prompt mostly lies in one run of consecutive slots, which attention can
read where it lies. On a CPU that is worth a look at the table; a GPU would have to wait for it, and gathers always.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cluster.attention.bias import MASKED
from cluster.kv.page_table import PageTable

LARGE = 1 << 23
"""Bytes of one layer from which on requests are read one by one. A smaller copy of all of them stays in a processor's
caches, and one call is faster than many; from 32 MB on the copy costs four times what attending to it does."""
LONG = 1 << 21
"""Bytes of one layer from which on a request that does not lie in one run is read in pieces, not copied."""
RUN = 1 << 18
"""Bytes of one layer from which on a run of slots is a piece of its own. A smaller one is copied together with what
lies about it, which costs less than products of its own."""


Pages = np.ndarray[tuple[int], np.dtype[np.int32]]


class Piece(NamedTuple):
    """`length` cells of each of some requests, in order of position: a slice of the pool, or slots `[R * length]`."""

    read: slice | Tensor
    length: int


class Held(NamedTuple):
    """What the host saw of R requests: how many tokens are committed, and the pages `[R, n]` that the longest needs."""

    committed: list[int]
    pages: np.ndarray[tuple[int, int], np.dtype[np.int32]]


def look(table: PageTable, rows: Tensor, lens: Tensor, more: int) -> Held | None:
    """On a CPU, what table rows `rows` `[R]` hold of `lens` `[R]` tokens and `more` after each; None on a GPU.

    The only place where attention asks the device.
    """
    if lens.device.type != "cpu":
        return None
    committed: list[int] = lens.tolist()
    most = -(-(max(committed) + more) // table.page_size)
    return Held(committed, table.device_pages.numpy()[rows.tolist(), :most])


class Cells:
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
        self.held = look(table, rows, lens, more)
        self.longest = min(longest, table.length) if self.held is None else max(self.held.committed)
        self._numbers = torch.arange(max(self.longest, more), device=lens.device)
        self._beyond: Tensor | None = None
        self._slots: Tensor | None = None
        self._bias: Tensor | None = None
        self._pieces: dict[tuple[int, int, int, bool], list[Piece]] = {}

    def apart(self, width: int, cell: int) -> bool:
        """Whether requests are better read one by one, with `width` slots after them and `cell` bytes a token."""
        if self.held is None:
            return False
        requests = len(self.held.committed)
        return requests == 1 or requests * (self.longest + width) * cell >= LARGE

    def slots(self, width: int) -> Tensor:
        """The slots `[R, P + width]` of the committed tokens, padded to P, then of `width` after them."""
        if self._slots is None:
            after = self._numbers[: self._more]
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
            self._beyond = self._numbers[: self.longest] >= self.lens[:, None]
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
        number = self._numbers[: self.longest]
        if apart:
            return (number + (self.lens[:, None] - self.longest)).clamp_(min=-1)
        return number.masked_fill(self.beyond, -1)

    def pieces(self, at: int, width: int, cell: int, several: bool) -> list[Piece]:
        """How request `at` is read alone: its committed tokens and `width` slots after them, `cell` bytes a token.

        A single run is a slice. Otherwise, if the request is `LONG` and `several` pieces may be, each `RUN` is a slice,
        and what lies between them is copied.
        """
        assert self.held is not None
        key = (at, width, cell, several)
        if key not in self._pieces:
            size, count = self._table.page_size, self.held.committed[at] + width
            least = -(-RUN // cell) if several and count * cell >= LONG else None
            spans = list(spans_of(self.held.pages[at, : -(-count // size)], size, least))
            if any(span.start is None for span in spans):
                slots = self._table.first_slots(self.rows[at : at + 1], count)[0]
            self._pieces[key] = pieces = []
            for first, last, start in spans:
                length = min(last, count) - first
                read = slots[first : first + length] if start is None else slice(start, start + length)
                pieces.append(Piece(read, length))
        return self._pieces[key]


class Span(NamedTuple):
    """Positions `first` to `last - 1` of a request, which lie in the slots from `start` on; None: in no order."""

    first: int
    last: int
    start: int | None


def spans_of(pages: Pages, size: int, least: int | None) -> Iterator[Span]:
    """What lies in `pages` of `size`: runs of `least` slots or more (None: of all), and what is between them."""
    ends = [*(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
    loose = begin = 0  # pages before `loose` are in a span
    for end in ends:
        if len(ends) == 1 or (least is not None and (end - begin) * size >= least):
            if loose < begin:
                yield Span(loose * size, begin * size, None)
            yield Span(begin * size, end * size, int(pages[begin]) * size)
            loose = end
        begin = end
    if loose < len(pages):
        yield Span(loose * size, len(pages) * size, None)
