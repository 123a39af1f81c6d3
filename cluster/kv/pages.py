"""Which page numbers are free. Page 0 is the sink, which padded rows write and nobody owns."""

from collections.abc import Sequence
from heapq import heappop, heappush

SINK_PAGE = 0


class PageAllocator:
    """Hands out page numbers 1 to `count`, never the sink, each to one owner at a time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(1, count + 1))
        self._is_free = [False] + [True] * count

    @property
    def free(self) -> int:
        """Pages with no owner."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """The `count` lowest free pages, in ascending order, so that consecutive tokens mostly lie side by side.

        Raises:
            MemoryError: fewer are free; nothing is taken.
        """
        if count > len(self._free):
            raise MemoryError(f"{count} pages wanted, {len(self._free)} free")
        taken = [heappop(self._free) for _ in range(count)]
        for page in taken:
            self._is_free[page] = False
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Return pages.

        Raises:
            ValueError: a page that is free already, or is the sink.
        """
        for page in pages:
            if page == SINK_PAGE or self._is_free[page]:
                raise ValueError(f"page {page} is freed twice or is the sink")
            self._is_free[page] = True
            heappush(self._free, page)
