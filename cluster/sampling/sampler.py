"""Choosing tokens from logits: the target's token after every node, a draft's proposals, log-probabilities to report.

A `Sampler` finds the best of the columns that a rank holds. If these are one shard of the vocabulary, `sharded` merges
what the shards found into one choice.
Legend: R requests, n rows of each, T own rows, T' rows scored, V token ids, v columns on this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster.models.vocab import ShardedLogits
from cluster.sampling.noise import at_least_float32
from cluster.sampling.row_blocks import blocks, concat
from cluster.sampling.sampling_inputs import SamplerInput, SamplingInputs
from cluster.sampling.sharded import ShardBest, best_of_all, scored_rows, top_of_all, whole
from cluster.sampling.torch_sampler import TORCH, Sampler, first_of_nan, joined

TOP_LOGPROBS = 20


def adjusted(
    columns: ShardedLogits, draws: Sequence[SamplingInputs], ids: Tensor | None = None
) -> tuple[ShardedLogits, Tensor | None]:
    """Return (logits, masks): the logits of own rows after penalties and grammars, in one of three forms.

    - (`columns`, None) if no request of the step has penalties or a grammar.
    - (`columns`, masks `[T, words]`) if only grammars change logits, and the sampler can apply token bitmasks as it
      reads the logits. With a vocabulary of 262,144 tokens, writing adjusted logits would take longer than the masks.
    - (adjusted logits, None) otherwise. These logits have all columns of the vocabulary, for this rank's own rows.

    `ids` `[V]` are the token ids of the columns. If `ids` is None, column i is token id i.
    """
    first = draws[0].adjust
    if first is None:
        return columns, None
    # Skip empty parts, but keep one if all are empty.
    some = [draw for draw in draws if draw.requests] or draws[:1]
    if first.masks_alone and ids is None and columns.shards is None and not draws[0].sampling.filtered:
        masks = [draw.adjust.masks(draw.each) for draw in some if draw.adjust is not None]
        return columns, concat(masks)
    columns, parts, start = whole(columns), [], 0
    for draw in some:
        assert draw.adjust is not None, "all requests share a mode"
        stop = start + draw.requests * draw.each
        rows = columns.values[start:stop].view(draw.requests, draw.each, columns.values.shape[1])
        parts.append(draw.adjust.apply(rows, ids).flatten(0, 1))
        start = stop
    return replace(columns, values=concat(parts)), None


def choose(columns: ShardedLogits, draws: Sequence[SamplingInputs], sampler: Sampler = TORCH) -> tuple[Tensor, Tensor]:
    """Return the target's token after every own row, and the score of that token, `[T]` each. `draws` cover the T rows,
    in order.
    """
    columns, masks = adjusted(columns, draws)
    chosen, score = sampler.best(scored_rows(columns, draws, masks))
    return (chosen, score) if columns.shards is None else best_of_all(columns, columns.shards, chosen, score)


def likeliest(
    columns: ShardedLogits, draw: SamplingInputs, count: int, sampler: Sampler = TORCH, masks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens after each own row: (log-probabilities, columns), `[T, count]` each.

    Log-probabilities are the log-softmax of the scores, noise included. For a row with NaN or an infinite total, they
    are NaN, and the columns are 0 to `count - 1`. `columns` and `masks` are as returned by `adjusted`.
    """
    rows = scored_rows(columns, [draw], masks)
    if columns.shards is None:
        return sampler.likeliest(rows, count)
    found = ShardBest(*sampler.found(rows, count))
    merged = top_of_all(columns, columns.shards, found, count)
    # A total of +-inf becomes NaN, and so the whole row becomes NaN.
    likely = (merged.values - merged.total.masked_fill(merged.total.isinf(), float("nan"))).to(found.values.dtype)
    return likely, first_of_nan(likely, merged.columns)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities after T rows: `chosen` `[T]` is that of a given token, `values` `[T, 20]` are those of the
    likeliest tokens `ids` `[T, 20]` (fewer columns if the vocabulary is smaller).
    """

    chosen: Tensor
    values: Tensor
    ids: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> "Logprobs":
        """Return a copy with `change` applied to each tensor."""
        return Logprobs(change(self.chosen), change(self.values), change(self.ids))


@dataclass(frozen=True, slots=True)
class Scores:
    """`logprobs` of q given tokens, and their `ranks` `[q]`: the number of tokens that are at least as likely as the
    given token, itself included.
    """

    logprobs: Logprobs
    ranks: Tensor


def logprobs(columns: ShardedLogits, rows: Tensor, tokens: Tensor, sampler: Sampler = TORCH) -> Logprobs:
    """Return log-probabilities of `tokens` `[T]` after own `rows` `[T]`, by the unfiltered, untempered logits."""
    count, shards = min(TOP_LOGPROBS, columns.vocab), columns.shards
    asked = torch.stack([rows + columns.first, tokens])
    if shards is not None and shards.wide:
        asked = shards.spread(asked.t()).t()
    values, columns_, total, own = joined(_asked(columns, asked, count, sampler))
    if shards is None:
        return Logprobs((own - total)[:, 0], values - total, columns_)
    merged = top_of_all(columns, shards, ShardBest(values, columns_, total, own), count)
    # Every shard sent a logit for the token; only the logit of the shard that holds the token, token // v, is right.
    made = merged.others.gather(0, (tokens // columns.values.shape[1])[None, :, None])[0]
    dtype = total.dtype
    return Logprobs((made - merged.total)[:, 0].to(dtype), (merged.values - merged.total).to(dtype), merged.columns)


def _asked(columns: ShardedLogits, asked: Tensor, count: int, sampler: Sampler) -> list[tuple[Tensor, ...]]:
    """Return, block by block, the fields of `ShardBest`; the last field is the logit of one given token per row.

    `asked` `[2, T']` are row numbers and tokens. If another shard holds a token, the token's logit here is arbitrary.
    """
    width, dtype = columns.values.shape[1], at_least_float32(columns.values.dtype)
    rows, local = asked[0], (asked[1] - columns.start).clamp_(0, width - 1)
    parts: list[tuple[Tensor, ...]] = []
    for block in blocks(rows.shape[0], width, columns.values.device):
        some = columns.values.index_select(0, rows[block])
        parts.append((*sampler.found(SamplerInput(some), count), some.gather(1, local[block, None]).to(dtype)))
    return parts


def scores(columns: ShardedLogits, tokens: Tensor, sampler: Sampler = TORCH) -> Scores:
    """Return log-probabilities and ranks of `tokens` `[q]`, one after each own row, by unadjusted logits."""
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    return Scores(logprobs(columns, rows, tokens, sampler), ranks(columns, tokens))


def ranks(columns: ShardedLogits, tokens: Tensor) -> Tensor:
    """Return `[q]`: after own row i, the number of tokens that are at least as likely as `tokens[i]`."""
    values, shards = columns.values, columns.shards
    if shards is None:
        return _at_least(values, values.gather(1, tokens[:, None]))[:, 0]
    # Only the shard that holds a token has its logit; `highest` brings it to all, then each shard counts its columns.
    asked = shards.spread(tokens[:, None]) if shards.wide else tokens[:, None]
    local, last = asked - columns.start, values.shape[1] - 1
    here = values.gather(1, local.clamp(0, last)).double()
    here.masked_fill_((local < 0) | (local > last), float("-inf"))
    found = shards.add(_at_least(values, shards.highest(here).to(values.dtype)))
    return found[columns.first : columns.first + tokens.shape[0], 0]


def _at_least(values: Tensor, least: Tensor) -> Tensor:
    """Return `[T, 1]`: how many entries of each row of `values` `[T, v]` are at least `least` `[T, 1]`."""
    cuts = blocks(values.shape[0], values.shape[1], values.device)
    return torch.cat([(values[cut] >= least[cut]).sum(1, keepdim=True) for cut in cuts])
