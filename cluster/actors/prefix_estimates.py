"""Which prefixes a rank holds, as its router estimates: pages by a hash of all tokens up to their end.

A page is keyed by its own tokens and the token after it, like a page of `cluster.kv.radix`. The index is an estimate: a
rank evicts without telling, so the index has the rank's capacity, and is corrected by what a request found cached. A
wrong estimate (or two chains with the same hash) costs a rank some prompt rows; it never changes a token.
"""

from collections import OrderedDict
from collections.abc import Sequence


def chain_of(tokens: Sequence[int], page_size: int, salt: int = 0) -> tuple[int, ...]:
    """One hash per reusable page of `tokens`, over `salt` and the prefix it ends; a token follows the last page."""
    ids, link = tuple(tokens), salt
    chain = []
    for start in range(0, len(ids) - page_size, page_size):
        link = hash((link, ids[start : start + page_size + 1]))
        chain.append(link)
    return tuple(chain)


class PrefixIndex:
    """The pages of one rank, least recently used first; at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._pages

    def held(self, chain: Sequence[int]) -> int:
        """How many pages at the start of `chain` the rank holds without a gap."""
        for count, link in enumerate(chain):
            if link not in self._pages:
                return count
        return len(chain)

    def add(self, chain: Sequence[int]) -> None:
        """The rank now holds `chain`, whose first pages are evicted last."""
        for link in reversed(chain):
            self._pages[link] = None
            self._pages.move_to_end(link)
        while len(self._pages) > self.capacity:
            self._pages.popitem(last=False)

    def drop(self, chain: Sequence[int]) -> None:
        """The rank no longer holds these pages."""
        for link in chain:
            self._pages.pop(link, None)

    def restarted(self, capacity: int) -> None:
        """The rank's cache is empty and has so many pages; an index without capacity stays off."""
        self._pages.clear()
        self.capacity = capacity if self.capacity else 0
