"""Says where the window pools keep the tokens of a page.

A layer with a sliding window reads only the last tokens of a request. The KV of such layers is in pools of its own, the
window pools. These have fewer pages than the pools of other layers, because a request needs pages there only for the
tokens that a later row may still see. `WindowMap` has one entry for each page of the cache (`KVCache`): the page of the
window pools with the KV of the same tokens, or 0, the sink page, if there is none. So all pools share one page table.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.batch import WindowPageWrite


class WindowMap:
    """The map `[pages + 1]`, int32, on the host and on the device. The device learns of a change before the step that
    needs it.
    """

    def __init__(self, pages: int, page_size: int, device: torch.device) -> None:
        """Make a map for a cache of `pages` pages. No page has a window page yet."""
        self.page_size = page_size
        self.host_pages = [0] * (pages + 1)
        self.device_pages = torch.zeros(pages + 1, dtype=torch.int32, device=device)
        self._unsent: dict[int, int] = {}

    def write(self, pages: Sequence[int], window_pages: Sequence[int]) -> None:
        """For each i, map page `pages[i]` to `window_pages[i]`, on the host."""
        for page, window_page in zip(pages, window_pages, strict=True):
            self.host_pages[page] = self._unsent[page] = window_page

    @property
    def unsent_writes(self) -> tuple[WindowPageWrite, ...]:
        """The last write of each page that has changed since the last `mark_sent`."""
        return tuple(WindowPageWrite(page, window_page) for page, window_page in self._unsent.items())

    def mark_sent(self) -> None:
        """Forget the unsent changes: the step that applies them has been sent to this device and to the followers."""
        self._unsent = {}

    def apply(self, written: Tensor) -> None:
        """Update the device's copy of the map. `written` `[2, n]` has n pages, then the window page of each."""
        self.device_pages.index_copy_(0, written[0], written[1].to(torch.int32))

    def slots(self, slots: Tensor) -> Tensor:
        """Return the slots of the window pools, int64, that belong to `slots` of the other pools. Slots without a
        window page become slots of the sink page.
        """
        pages = self.device_pages[slots.div(self.page_size, rounding_mode="floor")]
        return pages.to(torch.int64).mul_(self.page_size).add_(slots.remainder(self.page_size))
