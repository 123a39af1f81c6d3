"""Choosing tokens where the head is sharded over ranks: a few numbers per row travel instead of logits.

Each shard scores its own columns. For each row, shards exchange:

- the sampling inputs, if rows of other groups are scored too (`spread`);
- histograms for the filters' threshold, if there are filters (`highest`, `add`);
- the best columns that each shard found (`compare`).

All shards get the same numbers and compute the same from them, so all make the same choice.

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
from cluster.sampling.sampling_inputs import WORDS, SamplerInput, SamplingInputs, draw_of, words_of

DIGIT = 8  # bits of one histogram: 256 numbers of a row travel at once, in 4 rounds for 32 bits
CHOSEN = 2  # numbers per row that describe a shard's best: score and column
ASKED = 2  # numbers that name the log-probability to compute: row and token


def proposed(count: int, columns: int) -> int:
    """Return how many numbers per row a shard sends: scores and columns of its `count` best, and the log-sum-exp."""
    return 2 * min(count, columns) + 1


class ShardedHead(NamedTuple):
    """Lists the collectives that follow a head, so that a plan can announce them.

    `columns` is v; `bits` is the width of the dtype in which thresholds are searched; `wide` as in `Shards`.
    """

    columns: int
    bits: int
    wide: bool

    def choosing(self, mode: SamplingMode, told: int) -> list[tuple[str, int]]:
        """Return the calls of `Shards` that choose tokens, as (name, numbers per row); a shard sends `told`.

        If logits are adjusted, all logits are sent, because only a row's own group has the row's penalties and grammar.
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
        """Return the calls that give the log-probabilities of one token per row and of the `top` likeliest tokens."""
        asked = [("spread", ASKED)] if self.wide else []
        return [*asked, ("compare", proposed(top, self.columns) + 1)]

    def ranking(self) -> list[tuple[str, int]]:
        """Return the calls that count the tokens that are at least as likely as a given token."""
        return [*([("spread", 1)] if self.wide else []), ("highest", 1), ("add", 1)]


class ShardedRows:
    """`LogitRows` of which this rank holds one shard. Tempered logits are recomputed in each round, block by block."""

    def __init__(self, columns: ShardedLogits, shards: Shards, inverse: Tensor) -> None:
        """`inverse` `[T', 1]` are the inverse temperatures."""
        self.vocab, self._values, self._shards, self._inverse = columns.vocab, columns.values, shards, inverse
        count, each = self._values.shape
        self._blocks = blocks(count, AT_ONCE * each, self._values.device)
        self._columns = shards.size * each  # columns beyond the vocabulary are -inf, so they come last

    def highest(self) -> Tensor:
        """Return the highest logit over all shards; see `LogitRows.highest`."""
        own = torch.cat([self._tempered(block).amax(1, keepdim=True) for block in self._blocks])
        return self._shards.highest(own.double()).to(self._inverse.dtype)

    def kth(self, rank: Tensor) -> Tensor:
        """Search by count: `columns - rank` logits may be below the result; see `LogitRows.kth`."""
        return self._found(self._columns - rank, lambda _: None)

    def weigh(self, top: Tensor, kth: Tensor) -> Tensor:
        """Return the mass over all shards; see `LogitRows.weigh`."""
        self._top, self._least = top, kth
        self._total = self._shards.add(torch.cat([self._mass(block).sum(1, keepdim=True) for block in self._blocks]))
        return self._total

    def reaching(self, needed: Tensor) -> Tensor:
        """Search by mass: the mass `total - needed` may be below the result; see `LogitRows.reaching`."""
        return self._found(self._total - needed, self._mass)

    def _mass(self, block: slice) -> Tensor:
        return mass_of(self._tempered(block), self._top[block], self._least[block])

    def _tempered(self, block: slice) -> Tensor:
        return self._values[block].to(self._inverse.dtype) * self._inverse[block]

    def _found(self, spare: Tensor, weights: Callable[[slice], Tensor | None]) -> Tensor:
        """Return the largest logit of each row so that the weight of all logits below it is at most `spare`.

        Each round sums one histogram over blocks and shards. `weights` returns the weights of a block, or None if each
        logit weighs 1.
        """

        def part(block: slice, place: Digit) -> Tensor:
            bins = torch.empty(block.stop - block.start, 1 << DIGIT, dtype=torch.int64, device=spare.device)
            here = place._replace(found=place.found[block])
            return histogram_(bins, ordered(self._tempered(block)), here, weights(block))

        def filled(place: Digit) -> Tensor:
            return self._shards.add(torch.cat([part(block, place) for block in self._blocks]))

        dtype = self._inverse.dtype
        return float_of(descend(filled, spare, DIGIT, INTEGER[dtype]), dtype)


def scored_rows(columns: ShardedLogits, draws: Sequence[SamplingInputs], masks: Tensor | None = None) -> SamplerInput:
    """Return the sampler's input for the T' rows scored here. `draws` and `masks` are those of own rows, in order."""
    shards = columns.shards
    if shards is None or draws[0].noise is None:
        return SamplerInput(columns.values, draws, None, masks)
    if shards.wide:
        draws = [draw_of(shards.spread(words_of(draws)), draws[0])]
    if not draws[0].sampling.filtered:
        return SamplerInput(columns.values, draws, None, masks)

    def by_row(name: str) -> Tensor:
        return torch.cat([draw.by_row(getattr(draw.sampling, name)) for draw in draws])[:, None]

    rows = ShardedRows(columns, shards, by_row("inverse_temperature"))
    least = thresholds(rows, by_row("top_k"), by_row("top_p"), by_row("min_p"))
    return SamplerInput(columns.values, draws, least, masks)


def best_of_all(columns: ShardedLogits, shards: Shards, chosen: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best column of own rows and its score, `[T]` each. `chosen` and `score` `[T']` are this shard's best.

    As within a shard, the lowest column wins a tie, and NaN counts as highest.
    """
    every = shards.compare(torch.stack([score.double(), (chosen + columns.start).double()], 1))
    highest, shard = every[..., 0].max(0)
    return every[..., 1].gather(0, shard[None])[0].long(), highest.to(score.dtype)


def whole(columns: ShardedLogits) -> ShardedLogits:
    """Return all columns of own rows. If the rank has all, they are `columns`; else they are gathered, in float32 at
    least.
    """
    if columns.shards is None:
        return columns
    every = columns.shards.compare(columns.values.double())  # `compare` takes float64; the way there and back is exact
    joined = every.transpose(0, 1).flatten(1)[:, : columns.vocab]
    return ShardedLogits(joined.to(at_least_float32(columns.values.dtype)), columns.vocab)


class ShardBest(NamedTuple):
    """The best scores of a shard and their columns, `[T', k]` each, the log-sum-exp over its columns, `[T', 1]`, and
    optionally one more number per row, `[T', 1]`.
    """

    values: Tensor
    columns: Tensor
    total: Tensor
    other: Tensor | None = None


class MergedBest(NamedTuple):
    """The best scores of own rows over all shards, in float64, with fields as in `ShardBest`; `others` `[n, T, 1]` are
    each shard's `other`.
    """

    values: Tensor
    columns: Tensor
    total: Tensor
    others: Tensor


def top_of_all(columns: ShardedLogits, shards: Shards, found: ShardBest, count: int) -> MergedBest:
    """Return the `count` best of all shards; `found` is this shard's best. The lowest column wins a tie."""
    # Sort this shard's candidates by column. Shards follow in order of rank, so all candidates are in order of columns,
    # and the stable sort below keeps that order among ties.
    at, order = found.columns.sort(1)
    numbers = [found.values.gather(1, order), at + columns.start, found.total]
    numbers += [] if found.other is None else [found.other]
    every = shards.compare(torch.cat([each.double() for each in numbers], 1))
    k = at.shape[1]
    values, ids = (part.transpose(0, 1).flatten(1) for part in (every[..., :k], every[..., k : 2 * k]))
    highest, pick = values.sort(dim=1, descending=True, stable=True)
    total = every[..., 2 * k].logsumexp(0)[:, None]
    return MergedBest(highest[:, :count], ids.gather(1, pick[:, :count]).long(), total, every[..., 2 * k + 1 :])
