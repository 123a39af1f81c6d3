"""Allocation of page numbers. Page 0 is the sink page: padding rows write to it, and it has no owner."""

from collections.abc import Sequence
from heapq import heappop, heappush

SINK_PAGE = 0


class PageAllocator:
    """Allocates page numbers 1 to `count`, never the sink page. A page has one owner at a time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(1, count + 1))  # a heap, as `allocate` returns the lowest pages
        self._is_free = [False] + [True] * count

    @property
    def free_count(self) -> int:
        """The number of pages without an owner."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return the `count` lowest free pages in ascending order; they are no longer free.

        The choice of the lowest pages makes consecutive pages of a request mostly adjacent in memory, which CPU
        attention uses.

        Raises:
            MemoryError: fewer pages are free; none is allocated.
        """
        if count > len(self._free):
            raise MemoryError(f"{count} pages wanted, {len(self._free)} free")
        pages = [heappop(self._free) for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Free `pages`.

        Raises:
            ValueError: a page is already free, or is the sink page.
        """
        for page in pages:
            if page == SINK_PAGE or self._is_free[page]:
                raise ValueError(f"page {page} is freed twice or is the sink")
            self._is_free[page] = True
            heappush(self._free, page)
