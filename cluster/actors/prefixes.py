"""Which prefixes a rank holds, as far as its router knows: pages by a hash of all tokens up to their end.

A page is keyed by its own tokens and the token after it, like a page of `cluster.kv.radix`. The index guesses: a rank
evicts without telling, so it is bounded like the rank's cache, and corrected by what a request found there. A wrong
guess (or two chains with one hash) costs a rank some prompt rows, never a token.
"""

from collections import OrderedDict
from collections.abc import Sequence


def chain_of(tokens: Sequence[int], page_size: int) -> tuple[int, ...]:
    """One hash per reusable page of `tokens`, each over the prefix up to it; at least one token is beyond the last."""
    ids, link = tuple(tokens), 0
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

    def held(self, chain: Sequence[int]) -> int:
        """How many pages of `chain` the rank holds, counted from its start without a gap."""
        for count, link in enumerate(chain):
            if link not in self._pages:
                return count
        return len(chain)

    def add(self, chain: Sequence[int]) -> None:
        """The rank now holds `chain`; its first pages are the last to go."""
        for link in reversed(chain):
            self._pages[link] = None
            self._pages.move_to_end(link)
        while len(self._pages) > self.capacity:
            self._pages.popitem(last=False)

    def drop(self, chain: Sequence[int]) -> None:
        """The rank no longer holds these pages."""
        for link in chain:
            self._pages.pop(link, None)

    def clear(self) -> None:
        """The rank's cache is empty."""
        self._pages.clear()
