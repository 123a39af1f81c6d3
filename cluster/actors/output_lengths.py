"""The distribution of output lengths, learnt from the requests that ended: geometric, cut off at `max_tokens`.

Each token ends its request with the same probability: the number of stops divided by the number of tokens so far.
"""

import math

FIRST_GUESS = 128.0  # tokens per stop, assumed before any request has ended
LONG = 4096.0  # `FIRST_GUESS` of `quantile`: so large that `max_tokens`, which is mostly smaller, decides
MEMORY = 0.02  # weight of the latest request


class OutputLengths:
    """The learnt distribution of output lengths."""

    def __init__(self) -> None:
        self._tokens = self._stops = 0.0

    def ended(self, tokens: int, stopped: bool) -> None:
        """Note that a request ended after `tokens` tokens. `stopped`: the model ended it, not its token limit or a
        client that left.
        """
        self._tokens = (1.0 - MEMORY) * self._tokens + tokens
        self._stops = (1.0 - MEMORY) * self._stops + stopped

    def expected(self, most: int) -> float:
        """Return the expected number of tokens until a stop or the limit `most`. The prior is one stop per
        `FIRST_GUESS` tokens.
        """
        chance = min((self._stops + 1.0) / (self._tokens + FIRST_GUESS), 0.5)
        # E[min(length, most)] = (1 - (1 - chance)^most) / chance
        return -math.expm1(most * math.log1p(-chance)) / chance

    def quantile(self, share: float, most: int, lived: int) -> float:
        """Return the `share` quantile of the output length, at most `most`.

        `lived` counts the tokens of open requests; without these tokens the estimate would favour short requests. At
        least one stop is assumed per `LONG` tokens, or per all tokens seen if these are more.
        """
        # The quantile of a geometric distribution: 1 - (1 - chance)^n = share
        seen = max(self._tokens + lived, 1.0)
        chance = min(max(self._stops / seen, 1.0 / max(seen, LONG)), 0.5)
        return min(float(most), math.log1p(-share) / math.log1p(-chance))
