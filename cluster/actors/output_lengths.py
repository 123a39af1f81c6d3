"""How many new tokens requests have, learnt from those that ended, as a geometric distribution.

Every token has the same chance to be the last one, namely the share of last tokens among all tokens so far, up to
`max_tokens`.
"""

import math

FIRST_GUESS = 128.0  # tokens per stop that are assumed before any request has ended
LONG = 4096.0  # the same in `quantile`; long on purpose, so that max_tokens, which is mostly smaller, decides
MEMORY = 0.02  # weight of the latest request


class OutputLengths:
    """The learnt distribution."""

    def __init__(self) -> None:
        self._tokens = self._stops = 0.0

    def ended(self, tokens: int, stopped: bool) -> None:
        """A request ended after `tokens`; `stopped`: by itself, not at its limit or because its client left."""
        self._tokens = (1.0 - MEMORY) * self._tokens + tokens
        self._stops = (1.0 - MEMORY) * self._stops + stopped

    def expected(self, most: int) -> float:
        """The expected number of tokens until a stop or the limit `most`; prior: one stop per `FIRST_GUESS` tokens."""
        chance = min((self._stops + 1.0) / (self._tokens + FIRST_GUESS), 0.5)
        return -math.expm1(most * math.log1p(-chance)) / chance

    def quantile(self, share: float, most: int, lived: int) -> float:
        """The number of tokens that `share` of the requests do not exceed.

        `lived` counts the tokens of requests still running: without them the estimate would be biased towards short
        ones. Until a request has stopped, one stop in `LONG` tokens, or in those seen if more, is assumed.
        """
        seen = max(self._tokens + lived, 1.0)
        chance = min(max(self._stops / seen, 1.0 / max(seen, LONG)), 0.5)
        return min(float(most), math.log1p(-share) / math.log1p(-chance))
