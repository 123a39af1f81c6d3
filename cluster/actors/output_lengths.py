"""The distribution of output lengths, learnt from the requests that ended: geometric, cut off at `max_tokens`.

Every token has the same chance to be the last one: the share of last tokens among all tokens so far.
"""

import math

FIRST_GUESS = 128.0  # tokens per stop, assumed before any request has ended
LONG = 4096.0  # the same in `quantile`; so large that max_tokens, which is mostly smaller, decides
MEMORY = 0.02  # weight of the latest request


class OutputLengths:
    """The learnt distribution of output lengths."""

    def __init__(self) -> None:
        self._tokens = self._stops = 0.0

    def ended(self, tokens: int, stopped: bool) -> None:
        """Note that a request ended after `tokens`. `stopped`: by itself, not by its limit or a client that left."""
        self._tokens = (1.0 - MEMORY) * self._tokens + tokens
        self._stops = (1.0 - MEMORY) * self._stops + stopped

    def expected(self, most: int) -> float:
        """Return the expected tokens until a stop or the limit `most`; prior: one stop in `FIRST_GUESS` tokens."""
        chance = min((self._stops + 1.0) / (self._tokens + FIRST_GUESS), 0.5)
        # E[min(length, most)] = (1 - (1 - chance)^most) / chance
        return -math.expm1(most * math.log1p(-chance)) / chance

    def quantile(self, share: float, most: int, lived: int) -> float:
        """Return the number of tokens that a share `share` of the requests does not exceed, at most `most`.

        `lived` counts the tokens of open requests; without these the estimate would favour short requests. Before any
        stop, one stop in `LONG` tokens is assumed, or in the tokens seen if these are more.
        """
        # The quantile of a geometric distribution: 1 - (1 - chance)^n = share
        seen = max(self._tokens + lived, 1.0)
        chance = min(max(self._stops / seen, 1.0 / max(seen, LONG)), 0.5)
        return min(float(most), math.log1p(-share) / math.log1p(-chance))
