"""The slot table: for each running request, the pool slot of every logical token index."""

from collections.abc import Sequence

import torch

from cluster.batch import SlotWrite


class SlotTable:
    """`[rows + 1, length]` int64 on the device: page * page_size + offset, or 0 (in the sink) where nothing is held.

    The last row is reserved for idle requests: all of it points into the sink. A journal, where one is kept, holds
    writes that are not yet `sent` to the ranks that follow this one.
    """

    def __init__(self, rows: int, length: int, page_size: int, device: torch.device, journaled: bool = False) -> None:
        """`length` is the longest sequence plus the window, in tokens; it is rounded up to whole pages.

        `journaled`: other ranks follow this one.
        """
        self.page_size = page_size
        pages = -(-length // page_size)
        self._pages = torch.zeros(rows + 1, pages, page_size, dtype=torch.int64, device=device)
        self._offsets = torch.arange(page_size, device=device)
        self.slots = self._pages.view(rows + 1, pages * page_size)
        self.idle_row = rows
        self._journal: list[SlotWrite] | None = [] if journaled else None

    def write(self, rows: Sequence[int], indices: Sequence[int], pages: Sequence[int]) -> None:
        """Entry i: page `pages[i]` becomes the `indices[i]`-th page of row `rows[i]`."""
        if not rows:
            return
        if self._journal is not None:
            self._journal += map(SlotWrite, rows, indices, pages)
        where = torch.tensor([rows, indices, pages], device=self._pages.device)
        self._pages[where[0], where[1]] = where[2, :, None] * self.page_size + self._offsets

    def clear(self, row: int) -> None:
        """Point a row back at the sink."""
        if self._journal is not None:
            self._journal.append(SlotWrite(row, -1, 0))
        self._pages[row] = 0

    @property
    def unsent(self) -> tuple[SlotWrite, ...]:
        """Writes that are not yet `sent`; none where no journal is kept."""
        return tuple(self._journal or ())

    def sent(self) -> None:
        """Empty the journal: it has been sent to the ranks that follow."""
        if self._journal is not None:
            self._journal.clear()

    def replay(self, writes: Sequence[SlotWrite]) -> None:
        """Repeat the writes of another rank's journal, in order."""
        start = 0
        for end in [i for i, w in enumerate(writes) if w.entry < 0] + [len(writes)]:
            if end > start:
                self.write(*(list(column) for column in zip(*writes[start:end], strict=True)))
            if end < len(writes):
                self.clear(writes[end].row)
            start = end + 1
