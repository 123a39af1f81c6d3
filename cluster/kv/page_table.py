"""The page table: for each running request the pages of its tokens, in order.

The host's copy is as things are now. The device's is as of the last step, and lies where the device can read it without
asking the host; what has changed since travels with the next order, so leaders and followers keep it alike. How many
tokens of a request are committed is decided on the device, and the host learns of it later.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.batch import PageWrite


class PageTable:
    """Pages `[rows + 1, pages]` int32, 0 (the sink page) where nothing is held, and committed tokens `lens`
    `[rows + 1]` int64; the last row is that of idle requests.
    """

    def __init__(self, rows: int, length: int, page_size: int, device: torch.device) -> None:
        """`length` is the longest sequence plus the window, in tokens; it is rounded up to whole pages."""
        self.page_size, self.idle_row = page_size, rows
        shape = (rows + 1, -(-length // page_size))
        self.held = np.zeros(shape, dtype=np.int32)
        self.device_pages = torch.zeros(shape, dtype=torch.int32, device=device)
        self.lens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._offsets = torch.arange(page_size, dtype=torch.int32, device=device)
        self._cleared: list[int] = []
        self._written: dict[tuple[int, int], int] = {}

    @property
    def length(self) -> int:
        """How many tokens a row has room for."""
        return self.device_pages.shape[1] * self.page_size

    def write(self, rows: Sequence[int], indices: Sequence[int], pages: Sequence[int]) -> None:
        """Entry i: page `pages[i]` becomes the `indices[i]`-th page of row `rows[i]`."""
        if rows:
            self.held[rows, indices] = pages
            self._written.update(zip(zip(rows, indices, strict=True), pages, strict=True))

    def clear(self, row: int) -> None:
        """Point a row back at the sink."""
        self.held[row] = 0
        self._cleared.append(row)
        self._written = {at: page for at, page in self._written.items() if at[0] != row}

    @property
    def unsent(self) -> tuple[PageWrite, ...]:
        """What has changed since `sent`: first the rows that were cleared, then each entry that was written, once."""
        cleared = (PageWrite(row, -1, 0) for row in self._cleared)
        return (*cleared, *(PageWrite(row, entry, page) for (row, entry), page in self._written.items()))

    def sent(self) -> None:
        """The changes have reached the device, here and where others follow."""
        self._cleared, self._written = [], {}

    def apply(self, cleared: Tensor, written: Tensor) -> None:
        """Bring the device's copy up to date: rows `cleared` `[n]`, then `written` `[3, m]` rows, entries, pages."""
        self.device_pages.index_fill_(0, cleared, 0)
        self.device_pages.index_put_((written[0], written[1]), written[2].to(torch.int32))

    def commit(self, rows: Tensor, lens: Tensor) -> None:
        """The first `lens` `[B]` tokens of `rows` `[B]` are committed; idle requests have none, whatever they did."""
        self.lens.index_copy_(0, rows, lens)
        self.lens[-1:].zero_()

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Pool slots, int64, of the tokens at `positions` of `rows`, which broadcast; past the end, the last ones."""
        at = positions.clamp(max=self.length - 1)
        pages = self.device_pages[rows, at.div(self.page_size, rounding_mode="floor")]
        return pages.to(torch.int64).mul_(self.page_size).add_(at.remainder(self.page_size))

    def first_slots(self, rows: Tensor, count: int) -> Tensor:
        """Pool slots `[R, count]`, int32, of the first `count` tokens of `rows` `[R]`; at most as many as have room."""
        pages = self.device_pages[:, : -(-count // self.page_size)].index_select(0, rows)
        return self._offsets.add(pages[..., None], alpha=self.page_size).flatten(1)[:, :count]
