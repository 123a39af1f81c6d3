"""How many bytes the KV pools of a rank take, and how many of their pages are pages of window pools.

Layers with a sliding window are in window pools, where a request needs pages only for the tokens that a later row may
still see (`WindowNeeds`). How many pages these pools get, for each page of the other pools, follows from a request of
`EXPECTED_TOKENS` tokens.
"""

from dataclasses import dataclass
from math import ceil

EXPECTED_TOKENS = 2048
"""The tokens of a request for which the number of window pages is computed. If requests are longer, fewer of them fit
in the other pools, and window pages stay unused; if they are shorter, it may be that window pages run out first.
"""
KEPT_WINDOWS = 2
"""For each running request there are window pages for so many windows: its own, and others at the ends of cached
prefixes.
"""


@dataclass(frozen=True, slots=True)
class WindowNeeds:
    """What requests need in the window pools. Rows that may still be computed see at most the last `reach` committed
    tokens, and steps write at most `written` tokens behind them. A request needs at most `request_pages` pages, or
    those of all its tokens if it is shorter; while prompts are read, the chunks of all prompts together need up to
    `chunk_pages` more. `requests` is the largest number of running requests. For `ratio` see `pages`.
    """

    reach: int
    written: int
    request_pages: int
    chunk_pages: int
    requests: int
    ratio: float | None = None

    def reserved_pages(self, most_tokens: int | None, page_size: int) -> int:
        """Return how many pages a request may need that never has more than `most_tokens` tokens (None: any number)."""
        if most_tokens is None:
            return self.request_pages
        return min(self.request_pages, -(-(most_tokens + self.written) // page_size))

    @property
    def least_pages(self) -> int:
        """With fewer window pages, not even one request could run."""
        return self.request_pages + self.chunk_pages

    def pages(self, pages: int, page_size: int) -> int:
        """Return the number of window pages for `pages` pages of the other pools. It is never larger than `pages`: a
        page has at most one window page.

        With `ratio`, there are so many window pages for each page. If it is None, it is what requests of
        `EXPECTED_TOKENS` tokens need, but enough for all `requests` if this takes no more than half of `pages`.
        """
        if self.ratio is not None:
            return min(pages, max(self.least_pages, ceil(self.ratio * pages)))
        share = min(1.0, KEPT_WINDOWS * self.request_pages * page_size / EXPECTED_TOKENS)
        for_all = self.requests * self.request_pages
        wanted = max(ceil(share * pages), min(pages // 2, for_all)) + self.chunk_pages
        return min(pages, KEPT_WINDOWS * for_all + self.chunk_pages, max(self.least_pages, wanted))


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """The bytes of a token in the pools of all runners: `token_bytes` in pools without a window, and
    `window_token_bytes` in window pools. `window` is None if there are no window pools.
    """

    page_size: int
    token_bytes: int
    window_token_bytes: int = 0
    window: WindowNeeds | None = None

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes of pools that hold `tokens` tokens, without sink pages."""
        return tokens * self.token_bytes + self.window_tokens(tokens) * self.window_token_bytes

    def window_tokens(self, tokens: int) -> int:
        """Return how many tokens the window pools hold if the other pools hold `tokens`; 0 without window pools."""
        if self.window is None:
            return 0
        return self.window.pages(tokens // self.page_size, self.page_size) * self.page_size

    def tokens_in(self, size: int) -> int:
        """Return the largest number of tokens whose pools take at most `size` bytes; 0 if `size` is negative. With
        window pools it is a multiple of the page size.
        """
        if self.window is None:
            return max(0, size) // self.token_bytes
        low, high = 0, max(0, size) // max(1, self.token_bytes * self.page_size) + 1
        while high - low > 1:  # `low` pages fit, and `high` pages do not
            middle = (low + high) // 2
            if self.bytes_of(middle * self.page_size) <= size:
                low = middle
            else:
                high = middle
        return low * self.page_size

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page in all pools, for instance of the sink pages."""
        return self.page_size * (self.token_bytes + self.window_token_bytes)
