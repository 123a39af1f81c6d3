"""Decides where a request ends within the tokens of a step: at EOS, a stop token, a stop string or max_tokens."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cluster.request import FinishReason, RequestParams
from cluster.tokenizer.stop_strings import StopStrings
from cluster.tokenizer.tokenizer import TextTokenizer


class Cut(NamedTuple):
    """How many of the given tokens belong to the output, and why the request ends after them. If `reason` is None, the
    request goes on. `stop_reason` is the stop string or the stop token that ends it, otherwise None.
    """

    token_count: int
    reason: FinishReason | None = None
    stop_reason: str | int | None = None


class FinishCheck:
    """Finds the end of one request in its generated tokens."""

    def __init__(
        self,
        params: RequestParams,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        tokenizer: TextTokenizer | None,
        prompt_token_ids: Sequence[int],
    ) -> None:
        """`prompt_token_ids` are the tokens before the first generated one; stop strings match only after them. A
        config or a client may name end tokens with ids of `vocab_size` or more. They are ignored, because they are
        never generated.
        """
        end_tokens = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self.end_tokens = {token for token in end_tokens if 0 <= token < vocab_size}
        self._stop_strings: StopStrings | None = None
        if params.stop and tokenizer is not None:
            min_tokens = 0 if params.adjustments is None else params.adjustments.min_tokens
            self._stop_strings = StopStrings(tokenizer, prompt_token_ids, params.stop, min_tokens)

    def cut(self, tokens: Sequence[int], remaining_tokens: int) -> Cut:
        """Return where `tokens` end the request. `remaining_tokens` is the number of tokens that max_tokens still
        allows.
        """
        if tokens and not remaining_tokens:
            return Cut(0, "length")
        # The common case, without a loop.
        if self._stop_strings is None and len(tokens) < remaining_tokens and self.end_tokens.isdisjoint(tokens):
            return Cut(len(tokens))
        for count, token in enumerate(tokens, start=1):
            if token in self.end_tokens:
                return Cut(count, "stop", token)
            if self._stop_strings is not None:
                self._stop_strings.push((token,))
                if self._stop_strings.hit is not None:
                    return Cut(count, "stop", self._stop_strings.hit.stop)
            if count == remaining_tokens:
                return Cut(count, "length")
        return Cut(len(tokens))
