"""The router's estimate of the prompt prefixes that a rank has cached, as a set of page hashes.

A page's hash covers all tokens up to the end of the page and the token after it: `cluster.kv.radix` shares a page
between two prompts if these tokens agree. A rank does not report evictions. So the index evicts pages itself when it
holds more than the rank can, and is corrected by the numbers of cached tokens that requests report. A wrong estimate
(or two prefixes with the same hash) only costs a rank some prompt rows.
"""

from collections import OrderedDict
from collections.abc import Sequence


def page_hashes_of(tokens: Sequence[int], page_size: int, salt: int = 0) -> tuple[int, ...]:
    """Return one hash for each full page of `tokens` that is followed by another token. The hash covers `salt` and all
    tokens up to and including the following token.
    """
    ids, page_hash = tuple(tokens), salt
    hashes = []
    for start in range(0, len(ids) - page_size, page_size):
        page_hash = hash((page_hash, ids[start : start + page_size + 1]))
        hashes.append(page_hash)
    return tuple(hashes)


class PrefixIndex:
    """The pages that one rank is likely to have cached, least recently added first; at most `capacity` of them. With
    capacity 0 the index is disabled and stays empty.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._pages

    def count_cached(self, page_hashes: Sequence[int]) -> int:
        """Return how many of `page_hashes`, counted from the first one, come before the first that the index lacks."""
        for count, page_hash in enumerate(page_hashes):
            if page_hash not in self._pages:
                return count
        return len(page_hashes)

    def add(self, page_hashes: Sequence[int]) -> None:
        """Add these pages as the most recent ones, and evict the oldest pages beyond the capacity."""
        # Add the last page first. The first pages, without which the later ones are useless, are then evicted last.
        for page_hash in reversed(page_hashes):
            self._pages[page_hash] = None
            self._pages.move_to_end(page_hash)
        while len(self._pages) > self.capacity:
            self._pages.popitem(last=False)

    def drop(self, page_hashes: Sequence[int]) -> None:
        """Remove these pages."""
        for page_hash in page_hashes:
            self._pages.pop(page_hash, None)

    def reset(self, capacity: int) -> None:
        """Clear the index: the rank's cache is empty and has `capacity` pages. A disabled index stays disabled."""
        self._pages.clear()
        self.capacity = capacity if self.capacity else 0
