"""Choosing where a head is sharded: what its shards tell each other, and what follows from what all of them said.

Each shard scores its own columns. What travels of a row are a few numbers: how it draws, if its group is another one
(`spread`); the digits of its threshold, if it is filtered (`highest`, `add`); the best that each shard found
(`compare`). All shards see the same numbers and treat them alike, so all decide alike.

Legend: n shards, v columns of each, T own rows, T' rows scored, k candidates of a shard.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.batch import SamplingMode
from cluster.models.exchange import Shards
from cluster.models.vocab import ShardedLogits
from cluster.sampling.filters import AT_ONCE, INTEGER, float_of, mass_of, ordered, thresholds
from cluster.sampling.noise import at_least_float32
from cluster.sampling.radix_select import Digit, descend, histogram_
from cluster.sampling.row_blocks import blocks
from cluster.sampling.sampling_inputs import WORDS, SamplingInputs, draw_of, words_of

DIGIT = 8  # bits of one histogram: 256 numbers of a row travel at once, in 4 rounds for 32 bits
CHOSEN = 2  # numbers of a shard's best: its score and its column
ASKED = 2  # numbers that say which log-probability is asked for: a row and a token


def proposed(count: int, columns: int) -> int:
    """How many numbers of a row a shard tells of its `count` best of so many columns, and the log of their sum."""
    return 2 * min(count, columns) + 1


class ShardedHead(NamedTuple):
    """What determines the calls that follow a head: `columns` of each shard, whose logits are worked on with `bits`."""

    columns: int
    bits: int
    wide: bool

    def choosing(self, mode: SamplingMode, told: int) -> list[tuple[str, int]]:
        """The calls of `Shards` in which tokens are chosen, and their widths; a shard tells `told` numbers of a row.

        Where logits are adjusted all of them are told: what adjusts a row is known to its own group alone.
        """
        if mode.adjusts:
            return [("compare", self.columns)]
        calls = []
        if self.wide and SamplingMode.NOISY in mode:
            calls.append(("spread", WORDS))
        if SamplingMode.FILTERED in mode:
            rounds = [("add", 1 << DIGIT)] * -(-self.bits // DIGIT)
            calls += [("highest", 1), *rounds, ("add", 1), *rounds]
        return [*calls, ("compare", told)]

    def asking(self, top: int) -> list[tuple[str, int]]:
        """The calls that give log-probabilities: of a token, and of the `top` likeliest."""
        asked = [("spread", ASKED)] if self.wide else []
        return [*asked, ("compare", proposed(top, self.columns) + 1)]

    def ranking(self) -> list[tuple[str, int]]:
        """The calls that count how many tokens are at least as likely as one."""
        return [*([("spread", 1)] if self.wide else []), ("highest", 1), ("add", 1)]


class ShardedRows:
    """`Rows` of which a rank holds a shard's columns. Tempered logits are made anew in each round, block by block."""

    def __init__(self, columns: ShardedLogits, shards: Shards, inverse: Tensor) -> None:
        """`inverse` `[T', 1]` are the inverse temperatures."""
        self.vocab, self._values, self._shards, self._inverse = columns.vocab, columns.values, shards, inverse
        count, each = self._values.shape
        self._blocks = blocks(count, AT_ONCE * each, self._values.device)
        self._columns = shards.size * each  # those beyond the vocabulary are the least of all

    def highest(self) -> Tensor:
        """See `Rows.highest`."""
        own = torch.cat([self._tempered(block).amax(1, keepdim=True) for block in self._blocks])
        return self._shards.highest(own.double()).to(self._inverse.dtype)

    def kth(self, rank: Tensor) -> Tensor:
        """See `Rows.kth`."""
        return self._found(self._columns - rank, lambda _: None)

    def weigh(self, top: Tensor, kth: Tensor) -> Tensor:
        """See `Rows.weigh`."""
        self._top, self._least = top, kth
        self._total = self._shards.add(torch.cat([self._mass(block).sum(1, keepdim=True) for block in self._blocks]))
        return self._total

    def reaching(self, needed: Tensor) -> Tensor:
        """See `Rows.reaching`."""
        return self._found(self._total - needed, self._mass)

    def _mass(self, block: slice) -> Tensor:
        return mass_of(self._tempered(block), self._top[block], self._least[block])

    def _tempered(self, block: slice) -> Tensor:
        return self._values[block].to(self._inverse.dtype) * self._inverse[block]

    def _found(self, spare: Tensor, weights: Callable[[slice], Tensor | None]) -> Tensor:
        """The logit of each row below which as much weight lies as fits into `spare`."""

        def part(block: slice, place: Digit) -> Tensor:
            bins = torch.empty(block.stop - block.start, 1 << DIGIT, dtype=torch.int64, device=spare.device)
            here = place._replace(found=place.found[block])
            return histogram_(bins, ordered(self._tempered(block)), here, weights(block))

        def filled(place: Digit) -> Tensor:
            return self._shards.add(torch.cat([part(block, place) for block in self._blocks]))

        dtype = self._inverse.dtype
        return float_of(descend(filled, spare, DIGIT, INTEGER[dtype]), dtype)


def told(columns: ShardedLogits, draws: Sequence[SamplingInputs]) -> tuple[Sequence[SamplingInputs], Tensor | None]:
    """How the rows that this rank scores draw, and the least tempered logit that each keeps, `[T', 1]`; None where a
    rank can tell that alone. `draws` are those of own rows, in order.
    """
    shards = columns.shards
    if shards is None or draws[0].noise is None:
        return draws, None
    if shards.wide:
        draws = [draw_of(shards.spread(words_of(draws)), draws[0])]
    if not draws[0].sampling.filtered:
        return draws, None

    def by_row(name: str) -> Tensor:
        return torch.cat([draw.by_row(getattr(draw.sampling, name)) for draw in draws])[:, None]

    rows = ShardedRows(columns, shards, by_row("inverse_temperature"))
    return draws, thresholds(rows, by_row("top_k"), by_row("top_p"), by_row("min_p"))


def best_of_all(columns: ShardedLogits, shards: Shards, chosen: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """Own rows' column of the highest score, and that score, `[T]` each, from those that each shard found, `[T']`.

    As within a shard the lowest column wins a tie, and NaN is the highest.
    """
    every = shards.compare(torch.stack([score.double(), (chosen + columns.start).double()], 1))
    highest, shard = every[..., 0].max(0)
    return every[..., 1].gather(0, shard[None])[0].long(), highest.to(score.dtype)


def whole(columns: ShardedLogits) -> ShardedLogits:
    """All columns of own rows, in float32 at least where a rank has a shard of them."""
    if columns.shards is None:
        return columns
    every = columns.shards.compare(columns.values.double())  # and back, which is exact: what travels is in float64
    joined = every.transpose(0, 1).flatten(1)[:, : columns.vocab]
    return ShardedLogits(joined.to(at_least_float32(columns.values.dtype)), columns.vocab)


class ShardBest(NamedTuple):
    """The best scores of a shard's rows and their columns, `[T', k]`, the log of the sum over all columns, `[T', 1]`,
    and, where asked for, one number more of each row.
    """

    values: Tensor
    columns: Tensor
    total: Tensor
    other: Tensor | None = None


class MergedBest(NamedTuple):
    """The same over all shards, of own rows, in float64; `others` are what each shard said besides, `[n, T, 1]`."""

    values: Tensor
    columns: Tensor
    total: Tensor
    others: Tensor


def top_of_all(columns: ShardedLogits, shards: Shards, found: ShardBest, count: int) -> MergedBest:
    """The `count` best of all shards, from what each of them found. The lowest column wins a tie."""
    at, order = found.columns.sort(1)  # as the shards are in order, so are the columns of all
    numbers = [found.values.gather(1, order), at + columns.start, found.total]
    numbers += [] if found.other is None else [found.other]
    every = shards.compare(torch.cat([each.double() for each in numbers], 1))
    k = at.shape[1]
    values, ids = (part.transpose(0, 1).flatten(1) for part in (every[..., :k], every[..., k : 2 * k]))
    highest, pick = values.sort(dim=1, descending=True, stable=True)
    total = every[..., 2 * k].logsumexp(0)[:, None]
    return MergedBest(highest[:, :count], ids.gather(1, pick[:, :count]).long(), total, every[..., 2 * k + 1 :])
