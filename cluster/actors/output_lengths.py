"""The distribution of output lengths, learnt from the requests that ended: geometric, cut off at `max_tokens`.

Each token ends its request with the same probability: the number of stops divided by the number of tokens, where older
requests count less.
"""

import math

PRIOR_TOKENS_PER_STOP = 128.0  # tokens per stop, assumed before any request has ended
# `quantile` uses this in place of `PRIOR_TOKENS_PER_STOP`. It is so large that before the first stop `max_tokens`,
# which is usually smaller, limits the length.
MIN_TOKENS_PER_STOP_GUESS = 4096.0
DECAY = 0.02  # the share of the earlier sums that is forgotten when a request ends


class OutputLengths:
    """The learnt distribution of output lengths."""

    def __init__(self) -> None:
        self._tokens = self._stops = 0.0

    def on_ended(self, tokens: int, stopped: bool) -> None:
        """Record that a request ended after `tokens` tokens. `stopped`: the model ended it, not its token limit or a
        client that left.
        """
        self._tokens = (1.0 - DECAY) * self._tokens + tokens
        self._stops = (1.0 - DECAY) * self._stops + stopped

    def expected(self, max_tokens: int) -> float:
        """Return the expected number of tokens until a stop or the limit `max_tokens`. The prior is one stop per
        `PRIOR_TOKENS_PER_STOP` tokens.
        """
        stop_probability = min((self._stops + 1.0) / (self._tokens + PRIOR_TOKENS_PER_STOP), 0.5)
        # E[min(length, max_tokens)] = (1 - (1 - stop_probability)^max_tokens) / stop_probability
        return -math.expm1(max_tokens * math.log1p(-stop_probability)) / stop_probability

    def quantile(self, share: float, max_tokens: int, open_tokens: int) -> float:
        """Return the `share` quantile of the output length, at most `max_tokens`.

        `open_tokens` counts the tokens of open requests; without these tokens the estimate would favour short requests.
        At least one stop is assumed per `MIN_TOKENS_PER_STOP_GUESS` tokens, or per all tokens seen if these are more.
        """
        # The quantile n of a geometric distribution is the solution of 1 - (1 - stop_probability)^n = share.
        total_tokens = max(self._tokens + open_tokens, 1.0)
        stop_probability = min(max(self._stops / total_tokens, 1.0 / max(total_tokens, MIN_TOKENS_PER_STOP_GUESS)), 0.5)
        return min(float(max_tokens), math.log1p(-share) / math.log1p(-stop_probability))
