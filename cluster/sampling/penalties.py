"""What requests change in the distribution itself before a token is drawn: penalties, biases, bans, a least length.

What a row is penalised for depends on all tokens before it, so each node of a tree has its own (law 1): the request's
tokens are counted in a table on the device, and those of a node's path are added where its logits are worked on.

The order is that of transformers and vLLM: bias, repetition, frequency, presence, then bans.
Legend: R requests, n rows of each, V token ids, D tokens of a path, M bad words of at most L tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cluster.batch import RowPenalties, StepInput
from cluster.device.staging import Staging, bits_of
from cluster.sampling.noise import at_least_float32

BANNED = -1e30
"""Added to the logit of a token that must not come. Finite, so that a row is as sound as the model's numbers are."""
PROMPT, LATE, ONCE = 1, 2, 4
"""Of a token's mark: it is in the prompt; it must not come before the least length; it was generated once."""
REPETITION = 2  # its place among the numbers of a row, of which it alone is 1 where it changes nothing


class PenaltyTable:
    """The adjustments of all requests by row. It takes no memory before the first request that has some.

    `bias` `[rows, V]` are added to logits, `marks` `[rows, V]` int32 say what penalties ask of each token, `numbers`
    `[rows, 4]` are presence, frequency and repetition penalty and whether the row is adjusted at all. The row's output
    is `missing` `[rows]` tokens short of its least length. `words` `[rows, M, L]` are bad words, each with -1 before
    it, and `tails` `[rows, L - 1]` the last tokens.
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
        self._worded: dict[int, tuple[int, int]] = {}  # how many bad words a row has, and how long the longest is

    def make(self) -> None:
        """Take the memory, before a step in which some request has adjustments."""
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
        """Put the adjustments of admitted requests on their way; rows of those without any become neutral."""
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
        """Write what `stage` sent."""
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
        """The bad words of a row, each at the end of its line, and the tokens before the next. The table is as large as
        rows need it now: every step with some compares all of it.
        """
        self._worded[each.row] = len(each.bad_words), max(map(len, each.bad_words), default=1)
        lines, longest = (max(sizes) for sizes in zip(*self._worded.values(), strict=True))
        if self.words.shape[1:] != (lines, longest):
            self.words[each.row].fill_(-1)
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
        """The first `lens` `[B]` of `tokens` `[B, n]` were generated for `rows` `[B]`, some of which may have bad
        `words`.
        """
        counts = torch.arange(tokens.shape[1], device=tokens.device) < lens[:, None]
        self.marks.index_put_((rows[:, None], tokens), (counts * ONCE).to(self.marks.dtype), accumulate=True)
        self.missing.index_put_((rows,), -lens, accumulate=True)
        if not words:
            return
        kept = self.tails.shape[1]
        recent = torch.cat([self.tails.index_select(0, rows), tokens], 1)
        ahead = lens[:, None] + torch.arange(kept, device=tokens.device)
        self.tails.index_copy_(0, rows, recent.gather(1, ahead))

    def apply(self, logits: Tensor, rows: Tensor, path: Tensor, ids: Tensor | None, words: bool) -> Tensor:
        """Logits `[R, n, V]` of requests in `rows` `[R]`, after tokens `path` `[R, n, D]` that are not counted yet (-1
        beyond them), adjusted, in float32 at least. `ids` as in `Adjust.apply`; some may have bad `words`.
        """
        there = path >= 0
        depth = there.sum(2, keepdim=True)
        bias = self.bias.index_select(0, rows)[:, None]
        marks = self.marks.index_select(0, rows)[:, None].expand(-1, path.shape[1], -1).clone()
        marks.scatter_add_(2, path.clamp(min=0), (there * ONCE).to(marks.dtype))
        banned = self._finished_words(rows, path, depth, marks) if words else None
        if ids is None:  # of a draft, perhaps, whose tokens are the first of the target's
            size = logits.shape[2]
            bias, marks = bias[..., :size], marks[..., :size]
            banned = None if banned is None else banned[..., :size]
        else:
            bias, marks = bias.index_select(2, ids), marks.index_select(2, ids)
            banned = None if banned is None else banned.index_select(2, ids)
        numbers = self.numbers.index_select(0, rows)[:, None, :, None]
        presence, frequency, repetition, adjusted = numbers.unbind(2)
        made = logits.to(bias.dtype) + bias * adjusted
        repeated = torch.where(made > 0, made / repetition, made * repetition)
        made = torch.where(marks.bitwise_and(~LATE) != 0, repeated, made)
        count = marks >> 2
        made = made - frequency * count - presence * (count > 0)
        late = (marks & LATE != 0) & (depth < self.missing.index_select(0, rows)[:, None, None])
        return made.add_((late if banned is None else late | banned) * adjusted, alpha=BANNED)

    def _finished_words(self, rows: Tensor, path: Tensor, depth: Tensor, like: Tensor) -> Tensor:
        """Which tokens would end a bad word after each path, `[r, n, V]`."""
        r, n, vocab = like.shape
        words, kept = self.words.index_select(0, rows)[:, None], self.tails.shape[1]
        tails = self.tails.index_select(0, rows)[:, None].expand(r, n, kept)
        recent = torch.cat([tails, path], 2).gather(2, depth + torch.arange(kept, device=path.device))
        before, last = words[..., :-1], words[..., -1]
        found = ((before == recent[:, :, None]) | (before < 0)).all(3) & (last >= 0)
        banned = torch.zeros(r, n, vocab, dtype=torch.int32, device=path.device)
        return banned.scatter_add_(2, last.clamp(min=0).expand(r, n, -1), found.int()) > 0
