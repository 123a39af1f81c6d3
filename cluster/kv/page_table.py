"""The page table: the pages of each running request, in token order.

There are two copies. The host's copy (`host_pages`) is always current. The device's copy (`device_pages`) has the
entries of the last step. The changes since that step travel with the next step's `StepInput`, so leaders and followers
of an attention group apply the same changes. The device decides how many tokens of a request are committed; the host
learns it later.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.batch import PageWrite, WindowPageWrite
from cluster.kv.window_map import WindowMap


class PageTable:
    """Holds for each row the page ids of one request, `[rows + 1, pages]` int32, on the host and on the device. Unused
    entries are 0, the sink page, which belongs to no request. `lens` `[rows + 1]` int64, the number of committed tokens
    of each row, is on the device only. The last row belongs to idle (padding) requests.
    """

    def __init__(
        self, rows: int, length: int, page_size: int, device: torch.device, window_map: WindowMap | None = None
    ) -> None:
        """Make a table for `rows` requests. `length` is the longest sequence plus the window in tokens; it is rounded
        up to whole pages. `window_map` says where window pools keep the pages; None if there are no window pools.
        """
        self.page_size, self.idle_row, self.window_map = page_size, rows, window_map
        shape = (rows + 1, -(-length // page_size))
        self.host_pages = np.zeros(shape, dtype=np.int32)
        self.device_pages = torch.zeros(shape, dtype=torch.int32, device=device)
        self.lens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._offsets = torch.arange(page_size, dtype=torch.int32, device=device)
        self._cleared_rows: list[int] = []
        self._unsent_pages: dict[tuple[int, int], int] = {}

    @property
    def length(self) -> int:
        """The capacity of a row, in tokens."""
        return self.device_pages.shape[1] * self.page_size

    def write(self, rows: Sequence[int], indices: Sequence[int], pages: Sequence[int]) -> None:
        """For each i, make page `pages[i]` entry `indices[i]` of row `rows[i]`, on the host."""
        if rows:
            self.host_pages[rows, indices] = pages
            self._unsent_pages.update(zip(zip(rows, indices, strict=True), pages, strict=True))

    def clear(self, row: int) -> None:
        """Set all entries of a row to the sink page, on the host. Earlier unsent writes to the row are dropped."""
        self.host_pages[row] = 0
        self._cleared_rows.append(row)
        self._unsent_pages = {position: page for position, page in self._unsent_pages.items() if position[0] != row}

    @property
    def unsent_writes(self) -> tuple[PageWrite, ...]:
        """The changes since the last `mark_sent`: first the cleared rows, then the last write of each entry."""
        cleared = (PageWrite(row, -1, 0) for row in self._cleared_rows)
        return (*cleared, *(PageWrite(row, entry, page) for (row, entry), page in self._unsent_pages.items()))

    @property
    def unsent_window_writes(self) -> tuple[WindowPageWrite, ...]:
        """The changes of the window map since the last `mark_sent`."""
        return () if self.window_map is None else self.window_map.unsent_writes

    def mark_sent(self) -> None:
        """Forget the unsent changes: the step that applies them has been sent to this device and to the followers."""
        self._cleared_rows, self._unsent_pages = [], {}
        if self.window_map is not None:
            self.window_map.mark_sent()

    def apply(self, cleared: Tensor, written: Tensor) -> None:
        """Update the device's copy: clear rows `cleared` `[n]`, then write `written` `[3, m]`: rows, entries, pages."""
        self.device_pages.index_fill_(0, cleared, 0)
        self.device_pages.index_put_((written[0], written[1]), written[2].to(torch.int32))

    def commit(self, rows: Tensor, lens: Tensor) -> None:
        """Set the number of committed tokens of `rows` `[B]` to `lens` `[B]`, on the device."""
        # Padding requests use the last row. They may have accepted tokens, which must never count.
        self.lens.index_copy_(0, rows, lens)
        self.lens[-1:].zero_()

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the pool slots, int64, of the tokens at `positions` of `rows`; `rows` and `positions` broadcast with
        each other.

        slot = page * page_size + position % page_size. Positions past the end of a row get the last slot of the row.
        """
        positions_in_table = positions.clamp(max=self.length - 1)
        pages = self.device_pages[rows, positions_in_table.div(self.page_size, rounding_mode="floor")]
        return pages.to(torch.int64).mul_(self.page_size).add_(positions_in_table.remainder(self.page_size))

    def first_slots(self, rows: Tensor, count: int) -> Tensor:
        """Return the pool slots `[R, count]`, int32, of the first `count` tokens of `rows` `[R]`.

        If `count` is larger than `length`, the result has only `length` columns.
        """
        pages = self.pages_of(rows, -(-count // self.page_size))
        return self._offsets.add(pages[..., None], alpha=self.page_size).flatten(1)[:, :count]

    def pages_of(self, rows: Tensor, count: int) -> Tensor:
        """Return the first `count` pages of `rows` `[R]`, as `[R, count]` int32."""
        return self.device_pages[:, :count].index_select(0, rows)

    @property
    def device(self) -> torch.device:
        """The device of the table."""
        return self.device_pages.device


class WindowTable:
    """A page table as the window pools see it: its pages and slots are those of the window pools. Pages that the window
    pools do not keep are the sink page.
    """

    def __init__(self, table: PageTable, window_map: WindowMap) -> None:
        self._table, self._map = table, window_map
        self.page_size, self.device = table.page_size, table.device

    @property
    def length(self) -> int:
        """The capacity of a row, in tokens."""
        return self._table.length

    def first_slots(self, rows: Tensor, count: int) -> Tensor:
        """Return the slots of the window pools `[R, count]`; see `PageTable.first_slots`."""
        return self._map.slots(self._table.first_slots(rows, count))

    def pages_of(self, rows: Tensor, count: int) -> Tensor:
        """Return the first `count` pages of `rows` `[R]` in the window pools, as `[R, count]` int32."""
        return self._map.device_pages[self._table.pages_of(rows, count)]
