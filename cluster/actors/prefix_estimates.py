"""The router's estimate of the prompt prefixes that a rank has cached, as a set of page hashes.

A page's hash covers all tokens up to the end of the page and the token after it, like a page of `cluster.kv.radix`. A
rank does not report evictions. So the index evicts by itself beyond the rank's capacity, and is corrected by the cached
tokens that requests report. A wrong estimate (or two prefixes with the same hash) only costs a rank some prompt rows.
"""

from collections import OrderedDict
from collections.abc import Sequence


def chain_of(tokens: Sequence[int], page_size: int, salt: int = 0) -> tuple[int, ...]:
    """Return one hash for each full page of `tokens` that is followed by another token. The hash covers `salt` and all
    tokens up to and including the following token.
    """
    ids, link = tuple(tokens), salt
    chain = []
    for start in range(0, len(ids) - page_size, page_size):
        link = hash((link, ids[start : start + page_size + 1]))
        chain.append(link)
    return tuple(chain)


class PrefixIndex:
    """The pages that one rank is likely to have cached, least recently used first; at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._pages

    def held(self, chain: Sequence[int]) -> int:
        """Return how many pages at the start of `chain` the rank has, up to the first gap."""
        for count, link in enumerate(chain):
            if link not in self._pages:
                return count
        return len(chain)

    def add(self, chain: Sequence[int]) -> None:
        """Add the pages of `chain`."""
        for link in reversed(chain):  # so that first pages, without which the others are useless, are evicted last
            self._pages[link] = None
            self._pages.move_to_end(link)
        while len(self._pages) > self.capacity:
            self._pages.popitem(last=False)

    def drop(self, chain: Sequence[int]) -> None:
        """Remove these pages."""
        for link in chain:
            self._pages.pop(link, None)

    def restarted(self, capacity: int) -> None:
        """Clear the index: the rank's cache is empty and has `capacity` pages. A disabled index stays disabled."""
        self._pages.clear()
        self.capacity = capacity if self.capacity else 0
