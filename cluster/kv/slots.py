"""The slot table: for each running request, the pool slot of every logical token index."""

from collections.abc import Sequence

import torch


class SlotTable:
    """`[rows, length]` int64 on the device: page * page_size + offset, or 0 (in the sink) where nothing is held."""

    def __init__(self, rows: int, length: int, page_size: int, device: torch.device) -> None:
        """`length` is the longest sequence plus the window, in tokens; rounded up to whole pages."""
        self.page_size = page_size
        pages = -(-length // page_size)
        self._pages = torch.zeros(rows, pages, page_size, dtype=torch.int64, device=device)
        self._offsets = torch.arange(page_size, device=device)
        self.slots = self._pages.view(rows, pages * page_size)

    def write(self, rows: Sequence[int], indices: Sequence[int], pages: Sequence[int]) -> None:
        """Entry i: page `pages[i]` becomes the `indices[i]`-th page of row `rows[i]`."""
        if not rows:
            return
        where = torch.tensor([rows, indices, pages], device=self._pages.device)
        self._pages[where[0], where[1]] = where[2, :, None] * self.page_size + self._offsets

    def clear(self, row: int) -> None:
        """Point a row back at the sink."""
        self._pages[row] = 0
