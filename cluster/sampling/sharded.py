"""Choosing tokens where the head is sharded over ranks: ranks exchange a few numbers per row instead of logits.

Each shard scores its own columns. For each row, shards exchange (in brackets: the calls of `Shards`):

- the sampling inputs, if rows of other groups are scored too (`spread`);
- histograms for the filters' threshold, if there are filters (`highest`, `add`);
- the best columns that each shard found (`compare`).

For a row, all ranks that need its token get the same numbers and compute the same from them, so they make the same
choice.

Legend: n shards, v columns of each, T own rows (of this rank's attention group), T' rows that each shard scores (own
rows, or the rows of all groups), k candidates of a shard.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.batch import SamplingMode
from cluster.models.exchange import Shards
from cluster.models.vocab import ShardedLogits
from cluster.sampling.filters import (
    INTEGER_DTYPE,
    TEMPORARIES_PER_LOGIT,
    float_of_ordered_bits,
    logit_mass,
    ordered_bits,
    thresholds,
)
from cluster.sampling.noise import at_least_float32
from cluster.sampling.radix_select import Digit, histogram_, radix_descend
from cluster.sampling.row_blocks import blocks
from cluster.sampling.sampling_inputs import PACKED_NUMBERS, SamplerInput, SamplingInputs, pack_inputs, unpack_inputs

DIGIT_BITS = 8  # bits of one histogram: 256 numbers of a row are sent at a time, 4 times for 32 bits
NUMBERS_PER_CHOICE = 2  # numbers that a shard sends for each row to choose a token: its best score and that column
NUMBERS_PER_QUERY = 2  # numbers that say which log-probability to compute: row and token


def numbers_sent_per_row(top_count: int, columns: int) -> int:
    """Return how many numbers per row a shard sends for `merge_top`: scores and columns of the `top_count` best of its
    `columns`, and the log-sum-exp.
    """
    return 2 * min(top_count, columns) + 1


class ShardedHead(NamedTuple):
    """Lists the collectives that follow a head, so that ranks can agree on them before a step.

    `columns` is v; `bits` is the number of bits of the dtype in which thresholds are searched. `wide` says whether each
    shard scores the rows of all groups (`Shards.over_world`).
    """

    columns: int
    bits: int
    wide: bool

    def sampling_calls(self, mode: SamplingMode, numbers_per_row: int) -> list[tuple[str, int]]:
        """Return the calls of `Shards` that choose tokens, as (name, numbers per row). In the last call, each shard
        sends its results, `numbers_per_row`. If penalties or grammars change logits, there is one call, which sends all
        logits, because only a row's own group has the row's penalties and grammar.
        """
        if mode.changes_logits:
            return [("compare", self.columns)]
        calls = []
        if self.wide and SamplingMode.RANDOM in mode:
            calls.append(("spread", PACKED_NUMBERS))
        if SamplingMode.FILTERED in mode:
            histogram_calls = [("add", 1 << DIGIT_BITS)] * -(-self.bits // DIGIT_BITS)
            calls += [("highest", 1), *histogram_calls, ("add", 1), *histogram_calls]
        return [*calls, ("compare", numbers_per_row)]

    def logprob_calls(self, top_count: int) -> list[tuple[str, int]]:
        """Return the calls that give the log-probabilities of one token per row and of the `top_count` likeliest
        tokens.
        """
        spread_call = [("spread", NUMBERS_PER_QUERY)] if self.wide else []
        return [*spread_call, ("compare", numbers_sent_per_row(top_count, self.columns) + 1)]

    def rank_calls(self) -> list[tuple[str, int]]:
        """Return the calls that count the tokens that are at least as likely as a given token."""
        return [*([("spread", 1)] if self.wide else []), ("highest", 1), ("add", 1)]


class ShardedRows:
    """`LogitRows` of which this rank holds one shard. Tempered logits are computed again, block by block, for each call
    of `Shards`.
    """

    def __init__(self, logits: ShardedLogits, shards: Shards, inverse_temperature: Tensor) -> None:
        """`inverse_temperature` `[T', 1]` are the inverse temperatures."""
        self.vocab, self._values, self._shards, self._inverse = logits.vocab, logits.values, shards, inverse_temperature
        count, shard_columns = self._values.shape
        self._blocks = blocks(count, TEMPORARIES_PER_LOGIT * shard_columns, self._values.device)
        self._columns = shards.size * shard_columns  # columns beyond the vocabulary are -inf, so they come last

    def max_logits(self) -> Tensor:
        """Return the highest logit over all shards; see `LogitRows.max_logits`."""
        shard_max = torch.cat([self._tempered_block(block).amax(1, keepdim=True) for block in self._blocks])
        return self._shards.highest(shard_max.double()).to(self._inverse.dtype)

    def kth_logits(self, rank: Tensor) -> Tensor:
        """Search by count; see `LogitRows.kth_logits`. At most `_columns - rank` of all columns may be below the
        result.
        """
        return self._search(self._columns - rank, lambda _: None)

    def total_mass(self, max_logits: Tensor, top_k_threshold: Tensor) -> Tensor:
        """Return the mass over all shards; see `LogitRows.total_mass`."""
        self._max_logits, self._top_k_threshold = max_logits, top_k_threshold
        self._total_mass = self._shards.add(
            torch.cat([self._block_mass(block).sum(1, keepdim=True) for block in self._blocks])
        )
        return self._total_mass

    def mass_threshold(self, needed_mass: Tensor) -> Tensor:
        """Search by mass; see `LogitRows.mass_threshold`. The logits below the result may have a mass of at most
        `_total_mass - needed_mass`.
        """
        return self._search(self._total_mass - needed_mass, self._block_mass)

    def _block_mass(self, block: slice) -> Tensor:
        return logit_mass(self._tempered_block(block), self._max_logits[block], self._top_k_threshold[block])

    def _tempered_block(self, block: slice) -> Tensor:
        return self._values[block].to(self._inverse.dtype) * self._inverse[block]

    def _search(self, remaining_weight: Tensor, block_weights: Callable[[slice], Tensor | None]) -> Tensor:
        """Return the largest logit of each row so that the weight of all logits below it is at most `remaining_weight`.

        The search goes digit by digit; for each digit, one histogram is summed over all shards. `block_weights` returns
        the weights of a block's logits, or None if each logit weighs 1.
        """

        def block_histogram(block: slice, digit: Digit) -> Tensor:
            bins = torch.empty(
                block.stop - block.start, 1 << DIGIT_BITS, dtype=torch.int64, device=remaining_weight.device
            )
            block_digit = digit._replace(prefix=digit.prefix[block])
            return histogram_(bins, ordered_bits(self._tempered_block(block)), block_digit, block_weights(block))

        def histogram(digit: Digit) -> Tensor:
            return self._shards.add(torch.cat([block_histogram(block, digit) for block in self._blocks]))

        dtype = self._inverse.dtype
        return float_of_ordered_bits(
            radix_descend(histogram, remaining_weight, DIGIT_BITS, INTEGER_DTYPE[dtype]), dtype
        )


def sampler_input_of(
    logits: ShardedLogits, sampling_inputs: Sequence[SamplingInputs], masks: Tensor | None = None
) -> SamplerInput:
    """Return the sampler's input for the T' rows that this rank scores. `sampling_inputs` and `masks` belong to the T
    own rows, in the order of the rows. `masks` are None if no token bitmasks are to be applied.
    """
    shards = logits.shards
    if shards is None or sampling_inputs[0].noise is None:
        return SamplerInput(logits.values, sampling_inputs, None, masks)
    if shards.over_world:
        sampling_inputs = [unpack_inputs(shards.spread(pack_inputs(sampling_inputs)), sampling_inputs[0])]
    if not sampling_inputs[0].sampling.any_filtered:
        return SamplerInput(logits.values, sampling_inputs, None, masks)

    def by_row(name: str) -> Tensor:
        return torch.cat([inputs.by_row(getattr(inputs.sampling, name)) for inputs in sampling_inputs])[:, None]

    sharded_rows = ShardedRows(logits, shards, by_row("inverse_temperature"))
    shard_thresholds = thresholds(sharded_rows, by_row("top_k"), by_row("top_p"), by_row("min_p"))
    return SamplerInput(logits.values, sampling_inputs, shard_thresholds, masks)


def merge_best(
    logits: ShardedLogits, shards: Shards, best_columns: Tensor, best_scores: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the best column of each own row, over all shards, and its score, `[T]` each. `best_columns` and
    `best_scores` `[T']` are the best columns of this shard and their scores.

    As within a shard, the lowest column wins a tie, and NaN counts as highest.
    """
    shard_bests = shards.compare(torch.stack([best_scores.double(), (best_columns + logits.start).double()], 1))
    highest, shard = shard_bests[..., 0].max(0)
    return shard_bests[..., 1].gather(0, shard[None])[0].long(), highest.to(best_scores.dtype)


def gather_columns(logits: ShardedLogits) -> ShardedLogits:
    """Return the logits of own rows with all columns, `[T, V]`. If this rank has all columns, return `logits` itself.
    If not, gather the columns of all shards, in float32 or wider.
    """
    if logits.shards is None:
        return logits
    shard_logits = logits.shards.compare(
        logits.values.double()
    )  # `compare` takes float64; the conversion there and back is exact
    all_logits = shard_logits.transpose(0, 1).flatten(1)[:, : logits.vocab]
    return ShardedLogits(all_logits.to(at_least_float32(logits.values.dtype)), logits.vocab)


class ShardBest(NamedTuple):
    """The best scores of a shard and their columns, `[T', k]` each, the log-sum-exp over its columns, `[T', 1]`, and
    optionally one more number per row, `[T', 1]`.
    """

    values: Tensor
    columns: Tensor
    total: Tensor
    extra: Tensor | None = None


class MergedBest(NamedTuple):
    """The best scores of own rows over all shards, in float64. The fields are as in `ShardBest`, for T own rows;
    `extras` `[n, T, 1]` are the `extra` of each shard (`[n, T, 0]` without).
    """

    values: Tensor
    columns: Tensor
    total: Tensor
    extras: Tensor


def merge_top(logits: ShardedLogits, shards: Shards, shard_best: ShardBest, count: int) -> MergedBest:
    """Return the `count` best of all shards; `shard_best` is this shard's best. The lowest column wins a tie."""
    # Sort this shard's candidates by column. Shards follow in order of rank, so all candidates are in order of columns,
    # and the stable sort below keeps that order among ties.
    sorted_columns, column_order = shard_best.columns.sort(1)
    sent = [shard_best.values.gather(1, column_order), sorted_columns + logits.start, shard_best.total]
    sent += [] if shard_best.extra is None else [shard_best.extra]
    gathered = shards.compare(torch.cat([numbers.double() for numbers in sent], 1))
    candidates = sorted_columns.shape[1]
    values, ids = (
        shard_part.transpose(0, 1).flatten(1)
        for shard_part in (gathered[..., :candidates], gathered[..., candidates : 2 * candidates])
    )
    highest, best_first = values.sort(dim=1, descending=True, stable=True)
    total = gathered[..., 2 * candidates].logsumexp(0)[:, None]
    return MergedBest(
        highest[:, :count], ids.gather(1, best_first[:, :count]).long(), total, gathered[..., 2 * candidates + 1 :]
    )
