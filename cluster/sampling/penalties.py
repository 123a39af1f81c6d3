"""Logit adjustments that requests ask for: penalties, biases, allowed tokens, bad words, a minimum length.

Penalties depend on all tokens before a row, so each node of a tree has its own (law 1). A table on the device counts
the committed tokens of each request. When a node's logits are adjusted, the tokens of its path are counted too.

Adjustments are applied in the order of transformers and vLLM: bias, repetition, frequency, presence, then bans.
Legend: R requests, n rows of each, V token ids, D tokens of a path, M bad words of at most L tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cluster.batch import RowPenalties, StepInput
from cluster.device.staging import Staging, bits_of
from cluster.sampling.noise import at_least_float32

BANNED_TOKEN_BIAS = -1e30
"""This is added to the logit of a banned token. It is finite, so that only the model can make a row non-finite."""
IN_PROMPT, IS_STOP_TOKEN, OCCURRENCE = 1, 2, 4
"""A token's flags are a sum of these: `IN_PROMPT` if the token is in the prompt, `IS_STOP_TOKEN` if it is banned until
the output has its minimum length, and `OCCURRENCE` for each time that it was generated. So flags >> 2 is how often it
was generated.
"""
REPETITION_COLUMN = 2  # column of `penalties`; the only one whose neutral value is 1, not 0


class PenaltyTable:
    """The logit adjustments of all requests by row. The table takes no memory before the first request with
    adjustments.

    - `bias` `[rows, V]`: added to logits.
    - `flags` `[rows, V]` int32: see `IN_PROMPT`, `IS_STOP_TOKEN`, `OCCURRENCE`.
    - `penalties` `[rows, 4]`: presence, frequency and repetition penalty, and 1 if the row has adjustments, else 0.
    - `min_tokens_left` `[rows]`: how many tokens the output is short of its minimum length; 0 or less if it is not.
    - `bad_words` `[rows, M, L]`: bad words, padded with -1 in front. `recent_tokens` `[rows, L - 1]`: the last
      committed tokens.
    """

    bias: Tensor
    flags: Tensor
    penalties: Tensor
    min_tokens_left: Tensor
    bad_words: Tensor
    recent_tokens: Tensor

    def __init__(self, rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = (rows, vocab), at_least_float32(dtype), device
        self._allocated = False
        self._bad_word_sizes: dict[int, tuple[int, int]] = {}  # row -> (count, longest) of bad words

    def allocate(self) -> None:
        """Allocate the table, before the first step in which some request has adjustments."""
        if self._allocated:
            return
        rows, device = self._shape[0], self._device
        self.bias = torch.zeros(self._shape, dtype=self._dtype, device=device)
        self.flags = torch.zeros(self._shape, dtype=torch.int32, device=device)
        self.penalties = torch.zeros(rows, 4, dtype=self._dtype, device=device)
        self.penalties[:, REPETITION_COLUMN].fill_(1.0)
        self.min_tokens_left = torch.zeros(rows, dtype=torch.int64, device=device)
        self.bad_words = torch.full((rows, 0, 1), -1, device=device)
        self.recent_tokens = torch.full((rows, 0), -1, device=device)
        self._allocated = True

    def stage(self, step_input: StepInput, staging: Staging) -> None:
        """Add the adjustments of admitted requests to the next copy to the device. If an admitted request has none, its
        row gets neutral values.
        """
        adjusted_rows = {row_entry.row for row_entry in step_input.penalties}
        staging.add(
            "unadjusted_rows",
            [row_entry.row for row_entry in step_input.samplings if row_entry.row not in adjusted_rows]
            if self._allocated
            else [],
        )
        for i, row_entry in enumerate(step_input.penalties):
            staging.add(
                f"penalties {i}", map(bits_of, (row_entry.presence, row_entry.frequency, row_entry.repetition, 1.0))
            )
            staging.add(f"min_tokens_left {i}", [row_entry.min_tokens_left])
            staging.add(f"tokens {i}", row_entry.tokens)
            staging.add(f"stop_tokens {i}", row_entry.stop_tokens)
            staging.add(f"allowed {i}", row_entry.allowed or ())
            staging.add(f"biased_tokens {i}", [token for token, _ in row_entry.bias])
            staging.add(f"biases {i}", [bits_of(bias) for _, bias in row_entry.bias])
            staging.add(f"bad_words {i}", [token for word in row_entry.bad_words for token in word])

    def put(self, step_input: StepInput, staged: Mapping[str, Tensor]) -> None:
        """Write to the table what `stage` sent to the device."""
        if not self._allocated:
            return
        self.penalties.index_fill_(0, staged["unadjusted_rows"], 0.0)
        self.penalties[:, REPETITION_COLUMN].index_fill_(0, staged["unadjusted_rows"], 1.0)
        self.min_tokens_left.index_fill_(0, staged["unadjusted_rows"], 0)
        self.bad_words.index_fill_(0, staged["unadjusted_rows"], -1)
        for sampling in step_input.samplings:
            self._bad_word_sizes.pop(sampling.row, None)
        for i, penalties in enumerate(step_input.penalties):
            self._put_row(
                penalties,
                {name.rpartition(" ")[0]: tensor for name, tensor in staged.items() if name.endswith(f" {i}")},
            )

    def _put_row(self, penalties: RowPenalties, staged: Mapping[str, Tensor]) -> None:
        row, tokens = penalties.row, staged["tokens"]
        self.penalties[row] = staged["penalties"].view(torch.float64).to(self._dtype)
        self.min_tokens_left[row : row + 1] = staged["min_tokens_left"]
        # If the request lists its allowed tokens, the bias of all other tokens is a ban.
        bias, flags = self.bias[row], self.flags[row]
        bias.fill_(0.0 if penalties.allowed is None else BANNED_TOKEN_BIAS)
        if penalties.allowed is not None:
            bias.index_fill_(0, staged["allowed"], 0.0)
        bias.index_add_(0, staged["biased_tokens"], staged["biases"].view(torch.float64).to(self._dtype))
        flags.zero_().index_fill_(0, tokens[: penalties.prompt_len], IN_PROMPT)
        generated = tokens[penalties.prompt_len :]
        flags.index_add_(0, generated, torch.full_like(generated, OCCURRENCE, dtype=flags.dtype))
        flags.index_add_(
            0, staged["stop_tokens"], torch.full_like(staged["stop_tokens"], IS_STOP_TOKEN, dtype=flags.dtype)
        )
        self._put_bad_words(penalties, tokens, staged["bad_words"])

    def _put_bad_words(self, penalties: RowPenalties, tokens: Tensor, words: Tensor) -> None:
        """Write the bad words of a row to `bad_words`, padded in front, and the row's last tokens to `recent_tokens`.

        The table is resized to what the current rows need, because every step with bad words compares all of it.
        """
        self._bad_word_sizes[penalties.row] = len(penalties.bad_words), max(map(len, penalties.bad_words), default=1)
        max_words, max_length = (max(sizes) for sizes in zip(*self._bad_word_sizes.values(), strict=True))
        if self.bad_words.shape[1:] != (max_words, max_length):
            self.bad_words[penalties.row].fill_(-1)
            # Keep the overlap of the old and the new size, aligned at the right end.
            kept_words, kept_length = min(max_words, self.bad_words.shape[1]), min(max_length, self.bad_words.shape[2])
            resized_words = torch.full((self._shape[0], max_words, max_length), -1, device=self._device)
            resized_words[:, :kept_words, max_length - kept_length :] = self.bad_words[
                :, :kept_words, self.bad_words.shape[2] - kept_length :
            ]
            tails = torch.full((self._shape[0], max_length - 1), -1, device=self._device)
            tails[:, max_length - kept_length :] = self.recent_tokens[
                :, self.recent_tokens.shape[1] - kept_length + 1 :
            ]
            self.bad_words, self.recent_tokens = resized_words, tails
        self.bad_words[penalties.row].fill_(-1)
        start = 0
        for index, word in enumerate(penalties.bad_words):
            self.bad_words[penalties.row, index, max_length - len(word) :] = words[start : start + len(word)]
            start += len(word)
        self.recent_tokens[penalties.row].fill_(-1)
        if kept_length := min(max_length - 1, len(tokens)):
            self.recent_tokens[penalties.row, -kept_length:] = tokens[-kept_length:]

    def commit(self, rows: Tensor, tokens: Tensor, lens: Tensor, any_bad_words: bool) -> None:
        """Count the first `lens` `[B]` of `tokens` `[B, n]` as generated for table rows `rows` `[B]`.

        If `any_bad_words`, some row may have bad words, and `recent_tokens` are updated as well.
        """
        is_counted = torch.arange(tokens.shape[1], device=tokens.device) < lens[:, None]
        self.flags.index_put_((rows[:, None], tokens), (is_counted * OCCURRENCE).to(self.flags.dtype), accumulate=True)
        self.min_tokens_left.index_put_((rows,), -lens, accumulate=True)
        if not any_bad_words:
            return
        # New tail: the last L - 1 of (old tail, first `lens` tokens), entries lens to lens + L - 2.
        tail_length = self.recent_tokens.shape[1]
        recent = torch.cat([self.recent_tokens.index_select(0, rows), tokens], 1)
        tail_indices = lens[:, None] + torch.arange(tail_length, device=tokens.device)
        self.recent_tokens.index_copy_(0, rows, recent.gather(1, tail_indices))

    def apply(self, logits: Tensor, rows: Tensor, path: Tensor, ids: Tensor | None, any_bad_words: bool) -> Tensor:
        """Return adjusted logits `[R, n, V]` of the requests in table rows `rows` `[R]`, in float32 at least.

        `path` `[R, n, D]` are, for each row of logits, the tokens before it that the table has not counted yet, padded
        with -1. `ids` is as in `LogitsProcessor.apply`. If `any_bad_words`, some row may have bad words.
        """
        # Add the tokens of each node's own path to a copy of the request's flags.
        is_path_token = path >= 0
        depth = is_path_token.sum(2, keepdim=True)
        bias = self.bias.index_select(0, rows)[:, None]
        flags = self.flags.index_select(0, rows)[:, None].expand(-1, path.shape[1], -1).clone()
        flags.scatter_add_(2, path.clamp(min=0), (is_path_token * OCCURRENCE).to(flags.dtype))
        word_bans = self._banned_by_words(rows, path, depth, flags) if any_bad_words else None
        if ids is None:  # a draft's vocabulary may be the first `size` ids of the target's
            size = logits.shape[2]
            bias, flags = bias[..., :size], flags[..., :size]
            word_bans = None if word_bans is None else word_bans[..., :size]
        else:
            bias, flags = bias.index_select(2, ids), flags.index_select(2, ids)
            word_bans = None if word_bans is None else word_bans.index_select(2, ids)
        penalties = self.penalties.index_select(0, rows)[:, None, :, None]
        presence, frequency, repetition, has_adjustments = penalties.unbind(2)
        # Repetition, for tokens in prompt or output: x / r if x > 0, else x * r. Then, with c occurrences in the
        # output: x - frequency * c - presence * [c > 0].
        adjusted_logits = logits.to(bias.dtype) + bias * has_adjustments
        repeated = torch.where(adjusted_logits > 0, adjusted_logits / repetition, adjusted_logits * repetition)
        adjusted_logits = torch.where(flags.bitwise_and(~IS_STOP_TOKEN) != 0, repeated, adjusted_logits)
        occurrences = flags >> 2
        adjusted_logits = adjusted_logits - frequency * occurrences - presence * (occurrences > 0)
        # A node at depth d has d more tokens of output than the table has counted.
        is_banned = (flags & IS_STOP_TOKEN != 0) & (depth < self.min_tokens_left.index_select(0, rows)[:, None, None])
        return adjusted_logits.add_(
            (is_banned if word_bans is None else is_banned | word_bans) * has_adjustments, alpha=BANNED_TOKEN_BIAS
        )

    def _banned_by_words(self, rows: Tensor, path: Tensor, depth: Tensor, template: Tensor) -> Tensor:
        """Return a bool mask `[R, n, V]`, the shape of `template`, of the tokens that would complete a bad word after
        each path.
        """
        r, n, vocab = template.shape
        words, tail_length = self.bad_words.index_select(0, rows)[:, None], self.recent_tokens.shape[1]
        tails = self.recent_tokens.index_select(0, rows)[:, None].expand(r, n, tail_length)
        # The last L - 1 tokens before each node. A word matches if all its tokens but the last do; -1 matches anything.
        recent = torch.cat([tails, path], 2).gather(2, depth + torch.arange(tail_length, device=path.device))
        prefix, last_token = words[..., :-1], words[..., -1]
        is_match = ((prefix == recent[:, :, None]) | (prefix < 0)).all(3) & (last_token >= 0)
        match_counts = torch.zeros(r, n, vocab, dtype=torch.int32, device=path.device)
        return match_counts.scatter_add_(2, last_token.clamp(min=0).expand(r, n, -1), is_match.int()) > 0
