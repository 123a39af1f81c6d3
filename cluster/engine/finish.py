"""Decides where a request ends within the tokens of a step: at EOS, a stop token, a stop string or max_tokens."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cluster.request import FinishReason, RequestParams
from cluster.tokenizer.stop_strings import StopStrings
from cluster.tokenizer.tokenizer import TextTokenizer


class Cut(NamedTuple):
    """How many tokens of a run are kept, and why the request ends after them. It goes on if `reason` is None."""

    kept: int
    reason: FinishReason | None = None
    stop_reason: str | int | None = None


class FinishCheck:
    """Finds the end of one request in its generated tokens. A run is the tokens of one step."""

    def __init__(
        self,
        params: RequestParams,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        tokenizer: TextTokenizer | None,
        prompt_token_ids: Sequence[int],
    ) -> None:
        """`prompt_token_ids` are the tokens before the first generated one; stop strings match only after them. End
        tokens of `vocab_size` or more, which a config or a client may name, are dropped: they are never generated.
        """
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self.ends = {token for token in ends if 0 <= token < vocab_size}
        self._stops: StopStrings | None = None
        if params.stop and tokenizer is not None:
            least = 0 if params.adjustments is None else params.adjustments.min_tokens
            self._stops = StopStrings(tokenizer, prompt_token_ids, params.stop, least)

    def cut(self, run: Sequence[int], room: int) -> Cut:
        """Return where the run ends the request. `room` is the number of tokens that max_tokens still allows."""
        if run and not room:
            return Cut(0, "length")
        if self._stops is None and len(run) < room and self.ends.isdisjoint(run):  # the common case, without a loop
            return Cut(len(run))
        for kept, token in enumerate(run, start=1):
            if token in self.ends:
                return Cut(kept, "stop", token)
            if self._stops is not None:
                self._stops.push((token,))
                if self._stops.hit is not None:
                    return Cut(kept, "stop", self._stops.hit.stop)
            if kept == room:
                return Cut(kept, "length")
        return Cut(len(run))
