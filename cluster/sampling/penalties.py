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

BANNED = -1e30
"""Added to the logit of a banned token. Finite, so that only the model can make a row non-finite."""
PROMPT, LATE, ONCE = 1, 2, 4
"""A token's mark is a sum of these: `PROMPT` if the token is in the prompt, `LATE` if it is banned before the minimum
length, and `ONCE` for each time it was generated. So mark >> 2 is the count."""
REPETITION = 2  # column of `numbers`; the only one whose neutral value is 1, not 0


class PenaltyTable:
    """The logit adjustments of all requests by row. The table takes no memory before the first request with
    adjustments.

    - `bias` `[rows, V]`: added to logits.
    - `marks` `[rows, V]` int32: see `PROMPT`, `LATE`, `ONCE`.
    - `numbers` `[rows, 4]`: presence, frequency and repetition penalty, and 1 if the row has adjustments, else 0.
    - `missing` `[rows]`: how many tokens the output is short of its minimum length.
    - `words` `[rows, M, L]`: bad words, padded with -1 in front. `tails` `[rows, L - 1]`: the last committed tokens.
    """

    bias: Tensor
    marks: Tensor
    numbers: Tensor
    missing: Tensor
    words: Tensor
    tails: Tensor

    def __init__(self, rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = (rows, vocab), at_least_float32(dtype), device
        self._made = False
        self._worded: dict[int, tuple[int, int]] = {}  # row -> (count, longest) of bad words

    def make(self) -> None:
        """Allocate the table, before the first step in which some request has adjustments."""
        if self._made:
            return
        rows, device = self._shape[0], self._device
        self.bias = torch.zeros(self._shape, dtype=self._dtype, device=device)
        self.marks = torch.zeros(self._shape, dtype=torch.int32, device=device)
        self.numbers = torch.zeros(rows, 4, dtype=self._dtype, device=device)
        self.numbers[:, REPETITION].fill_(1.0)
        self.missing = torch.zeros(rows, dtype=torch.int64, device=device)
        self.words = torch.full((rows, 0, 1), -1, device=device)
        self.tails = torch.full((rows, 0), -1, device=device)
        self._made = True

    def stage(self, order: StepInput, staging: Staging) -> None:
        """Add the adjustments of admitted requests to the next copy to the device; rows without any become neutral."""
        adjusted = {each.row for each in order.adjustings}
        staging.add("plain", [each.row for each in order.samplings if each.row not in adjusted] if self._made else [])
        for i, each in enumerate(order.adjustings):
            staging.add(f"numbers {i}", map(bits_of, (each.presence, each.frequency, each.repetition, 1.0)))
            staging.add(f"missing {i}", [each.missing])
            staging.add(f"tokens {i}", each.tokens)
            staging.add(f"late {i}", each.late)
            staging.add(f"allowed {i}", each.allowed or ())
            staging.add(f"biased {i}", [token for token, _ in each.bias])
            staging.add(f"biases {i}", [bits_of(bias) for _, bias in each.bias])
            staging.add(f"words {i}", [token for word in each.bad_words for token in word])

    def put(self, order: StepInput, sent: Mapping[str, Tensor]) -> None:
        """Write what `stage` sent to the table."""
        if not self._made:
            return
        self.numbers.index_fill_(0, sent["plain"], 0.0)
        self.numbers[:, REPETITION].index_fill_(0, sent["plain"], 1.0)
        self.missing.index_fill_(0, sent["plain"], 0)
        self.words.index_fill_(0, sent["plain"], -1)
        for sampling in order.samplings:
            self._worded.pop(sampling.row, None)
        for i, each in enumerate(order.adjustings):
            self._put(each, {name.rpartition(" ")[0]: at for name, at in sent.items() if name.endswith(f" {i}")})

    def _put(self, each: RowPenalties, sent: Mapping[str, Tensor]) -> None:
        row, tokens = each.row, sent["tokens"]
        self.numbers[row] = sent["numbers"].view(torch.float64).to(self._dtype)
        self.missing[row : row + 1] = sent["missing"]
        # If the request lists its allowed tokens, the bias of all other tokens is a ban.
        bias, marks = self.bias[row], self.marks[row]
        bias.fill_(0.0 if each.allowed is None else BANNED)
        if each.allowed is not None:
            bias.index_fill_(0, sent["allowed"], 0.0)
        bias.index_add_(0, sent["biased"], sent["biases"].view(torch.float64).to(self._dtype))
        marks.zero_().index_fill_(0, tokens[: each.prompt_len], PROMPT)
        generated = tokens[each.prompt_len :]
        marks.index_add_(0, generated, torch.full_like(generated, ONCE, dtype=marks.dtype))
        marks.index_add_(0, sent["late"], torch.full_like(sent["late"], LATE, dtype=marks.dtype))
        self._put_words(each, tokens, sent["words"])

    def _put_words(self, each: RowPenalties, tokens: Tensor, words: Tensor) -> None:
        """Write the bad words of a row, each right-aligned in its line, and the row's last tokens.

        The table is resized to what the current rows need, because every step with bad words compares all of it.
        """
        self._worded[each.row] = len(each.bad_words), max(map(len, each.bad_words), default=1)
        lines, longest = (max(sizes) for sizes in zip(*self._worded.values(), strict=True))
        if self.words.shape[1:] != (lines, longest):
            self.words[each.row].fill_(-1)
            # Keep the overlap of the old and the new size, aligned at the right end.
            m, kept = min(lines, self.words.shape[1]), min(longest, self.words.shape[2])
            resized = torch.full((self._shape[0], lines, longest), -1, device=self._device)
            resized[:, :m, longest - kept :] = self.words[:, :m, self.words.shape[2] - kept :]
            tails = torch.full((self._shape[0], longest - 1), -1, device=self._device)
            tails[:, longest - kept :] = self.tails[:, self.tails.shape[1] - kept + 1 :]
            self.words, self.tails = resized, tails
        self.words[each.row].fill_(-1)
        start = 0
        for line, word in enumerate(each.bad_words):
            self.words[each.row, line, longest - len(word) :] = words[start : start + len(word)]
            start += len(word)
        self.tails[each.row].fill_(-1)
        if kept := min(longest - 1, len(tokens)):
            self.tails[each.row, -kept:] = tokens[-kept:]

    def commit(self, rows: Tensor, tokens: Tensor, lens: Tensor, words: bool) -> None:
        """Count the first `lens` `[B]` of `tokens` `[B, n]` as generated for table rows `rows` `[B]`.

        `words`: some row may have bad words, so `tails` are updated too.
        """
        counts = torch.arange(tokens.shape[1], device=tokens.device) < lens[:, None]
        self.marks.index_put_((rows[:, None], tokens), (counts * ONCE).to(self.marks.dtype), accumulate=True)
        self.missing.index_put_((rows,), -lens, accumulate=True)
        if not words:
            return
        # New tail: the last L - 1 of (old tail, first `lens` tokens), entries lens to lens + L - 2.
        kept = self.tails.shape[1]
        recent = torch.cat([self.tails.index_select(0, rows), tokens], 1)
        ahead = lens[:, None] + torch.arange(kept, device=tokens.device)
        self.tails.index_copy_(0, rows, recent.gather(1, ahead))

    def apply(self, logits: Tensor, rows: Tensor, path: Tensor, ids: Tensor | None, words: bool) -> Tensor:
        """Return adjusted logits `[R, n, V]` of the requests in table rows `rows` `[R]`, in float32 at least.

        `path` `[R, n, D]` are tokens before each row of logits that the table has not counted yet, padded with -1.
        `ids` as in `LogitsProcessor.apply`. `words`: some row may have bad words.
        """
        # Add the tokens of each node's own path to a copy of the request's marks.
        there = path >= 0
        depth = there.sum(2, keepdim=True)
        bias = self.bias.index_select(0, rows)[:, None]
        marks = self.marks.index_select(0, rows)[:, None].expand(-1, path.shape[1], -1).clone()
        marks.scatter_add_(2, path.clamp(min=0), (there * ONCE).to(marks.dtype))
        banned = self._finished_words(rows, path, depth, marks) if words else None
        if ids is None:  # a draft's vocabulary may be the first `size` ids of the target's
            size = logits.shape[2]
            bias, marks = bias[..., :size], marks[..., :size]
            banned = None if banned is None else banned[..., :size]
        else:
            bias, marks = bias.index_select(2, ids), marks.index_select(2, ids)
            banned = None if banned is None else banned.index_select(2, ids)
        numbers = self.numbers.index_select(0, rows)[:, None, :, None]
        presence, frequency, repetition, adjusted = numbers.unbind(2)
        # Repetition, for tokens in prompt or output: x / r if x > 0, else x * r. Then, with c occurrences in the
        # output: x - frequency * c - presence * [c > 0].
        made = logits.to(bias.dtype) + bias * adjusted
        repeated = torch.where(made > 0, made / repetition, made * repetition)
        made = torch.where(marks.bitwise_and(~LATE) != 0, repeated, made)
        count = marks >> 2
        made = made - frequency * count - presence * (count > 0)
        # A node at depth d has d more tokens of output than the table has counted.
        late = (marks & LATE != 0) & (depth < self.missing.index_select(0, rows)[:, None, None])
        return made.add_((late if banned is None else late | banned) * adjusted, alpha=BANNED)

    def _finished_words(self, rows: Tensor, path: Tensor, depth: Tensor, like: Tensor) -> Tensor:
        """Return bool `[r, n, V]`, the shape of `like`: tokens that would complete a bad word after each path."""
        r, n, vocab = like.shape
        words, kept = self.words.index_select(0, rows)[:, None], self.tails.shape[1]
        tails = self.tails.index_select(0, rows)[:, None].expand(r, n, kept)
        # The last L - 1 tokens before each node. A word matches if all its tokens but the last do; -1 matches anything.
        recent = torch.cat([tails, path], 2).gather(2, depth + torch.arange(kept, device=path.device))
        before, last = words[..., :-1], words[..., -1]
        found = ((before == recent[:, :, None]) | (before < 0)).all(3) & (last >= 0)
        banned = torch.zeros(r, n, vocab, dtype=torch.int32, device=path.device)
        return banned.scatter_add_(2, last.clamp(min=0).expand(r, n, -1), found.int()) > 0
