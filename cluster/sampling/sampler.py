"""Choosing tokens from logits: the target's token after every node, a draft's proposals, log-probabilities to report.

A `Sampler` finds the best of the columns that a rank holds. If these are one shard of the vocabulary, `sharded` merges
what the shards found into one choice.
Legend: R requests, n rows of each, T own rows (those of this rank's attention group), T' rows that this rank scores
(own rows, or the rows of all groups), V token ids, v columns on this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster.models.vocab import ShardedLogits
from cluster.sampling.noise import at_least_float32
from cluster.sampling.row_blocks import blocks, concat
from cluster.sampling.sampling_inputs import SamplerInput, SamplingInputs
from cluster.sampling.sharded import ShardBest, gather_columns, merge_best, merge_top, sampler_input_of
from cluster.sampling.torch_sampler import TORCH, Sampler, columns_without_nan, concat_results

TOP_LOGPROBS = 20


def adjust_logits(
    logits: ShardedLogits, sampling_inputs: Sequence[SamplingInputs], ids: Tensor | None = None
) -> tuple[ShardedLogits, Tensor | None]:
    """Return (logits, masks): the logits of own rows after penalties and grammars, in one of three forms.

    - (`logits`, None) if no request of the step has penalties or a grammar.
    - (`logits`, masks `[T, words]`) if only grammars change logits, and the sampler can apply token bitmasks as it
      reads the logits. With a vocabulary of 262,144 tokens, it would take longer to write adjusted logits than to make
      the masks.
    - (adjusted logits, None) otherwise. These logits have all columns of the vocabulary, for this rank's own rows.

    `ids` `[V]` are the token ids of the columns. If `ids` is None, column i is token id i.
    """
    first = sampling_inputs[0].processor
    if first is None:
        return logits, None
    # Skip inputs without requests, but keep one if none has requests.
    nonempty = [inputs for inputs in sampling_inputs if inputs.requests] or sampling_inputs[:1]
    if first.only_bitmasks and ids is None and logits.shards is None and not sampling_inputs[0].sampling.any_filtered:
        masks = [inputs.processor.masks(inputs.rows_per_request) for inputs in nonempty if inputs.processor is not None]
        return logits, concat(masks)
    logits, row_parts, start = gather_columns(logits), [], 0
    for inputs in nonempty:
        assert inputs.processor is not None, "all requests share a mode"
        stop = start + inputs.requests * inputs.rows_per_request
        rows = logits.values[start:stop].view(inputs.requests, inputs.rows_per_request, logits.values.shape[1])
        row_parts.append(inputs.processor.apply(rows, ids).flatten(0, 1))
        start = stop
    return replace(logits, values=concat(row_parts)), None


def choose(
    logits: ShardedLogits, sampling_inputs: Sequence[SamplingInputs], sampler: Sampler = TORCH
) -> tuple[Tensor, Tensor]:
    """Return the target's token after every own row, and the score of that token, `[T]` each. `sampling_inputs` are
    those of the T rows, in the order of the rows.
    """
    logits, masks = adjust_logits(logits, sampling_inputs)
    best_columns, best_scores = sampler.best(sampler_input_of(logits, sampling_inputs, masks))
    return (
        (best_columns, best_scores)
        if logits.shards is None
        else merge_best(logits, logits.shards, best_columns, best_scores)
    )


def top_logprobs(
    logits: ShardedLogits, inputs: SamplingInputs, count: int, sampler: Sampler = TORCH, masks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens after each own row: (log-probabilities, columns), `[T, count]` each.

    Log-probabilities are the log-softmax of the scores, noise included. For a row whose log-sum-exp is NaN or infinite,
    they are NaN, and the columns are 0 to `count - 1`. `logits` and `masks` are as returned by `adjust_logits`.
    """
    sampler_input = sampler_input_of(logits, [inputs], masks)
    if logits.shards is None:
        return sampler.top_logprobs(sampler_input, count)
    shard_best = ShardBest(*sampler.shard_best(sampler_input, count))
    merged = merge_top(logits, logits.shards, shard_best, count)
    # An infinite log-sum-exp becomes NaN, and so the whole row becomes NaN.
    log_probabilities = (merged.values - merged.total.masked_fill(merged.total.isinf(), float("nan"))).to(
        shard_best.values.dtype
    )
    return log_probabilities, columns_without_nan(log_probabilities, merged.columns)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities after T rows: `chosen` `[T]` is that of one given token per row, `values` `[T, 20]` are those
    of the likeliest tokens `ids` `[T, 20]` (fewer columns if the vocabulary is smaller).
    """

    chosen: Tensor
    values: Tensor
    ids: Tensor

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Logprobs":
        """Return a copy with `change` applied to each tensor."""
        return Logprobs(change(self.chosen), change(self.values), change(self.ids))


@dataclass(frozen=True, slots=True)
class Scores:
    """`logprobs` of q given tokens, and their `ranks` `[q]`: the number of tokens that are at least as likely as the
    given token, itself included.
    """

    logprobs: Logprobs
    ranks: Tensor


def logprobs(logits: ShardedLogits, rows: Tensor, tokens: Tensor, sampler: Sampler = TORCH) -> Logprobs:
    """Return the log-probability of each of `tokens` after the own row with the number in `rows`, and those of the
    likeliest tokens there. Both arguments have the same length. `logits` are as the head gives them: without penalties,
    temperature and filters.
    """
    count, shards = min(TOP_LOGPROBS, logits.vocab), logits.shards
    queries = torch.stack([rows + logits.first_row, tokens])
    if shards is not None and shards.over_world:
        queries = shards.spread(queries.t()).t()
    values, top_ids, total, token_logits = concat_results(_query_blocks(logits, queries, count, sampler))
    if shards is None:
        return Logprobs((token_logits - total)[:, 0], values - total, top_ids)
    merged = merge_top(logits, shards, ShardBest(values, top_ids, total, token_logits), count)
    # Every shard sent a logit for the token; only the logit of the shard that holds the token, token // v, is right.
    token_logits_here = merged.extras.gather(0, (tokens // logits.values.shape[1])[None, :, None])[0]
    dtype = total.dtype
    return Logprobs(
        (token_logits_here - merged.total)[:, 0].to(dtype), (merged.values - merged.total).to(dtype), merged.columns
    )


def _query_blocks(logits: ShardedLogits, queries: Tensor, count: int, sampler: Sampler) -> list[tuple[Tensor, ...]]:
    """Return the fields of `ShardBest` for each block of rows; the last field is the logit of one given token per row.

    `queries` `[2, T']` are row numbers and tokens. If another shard holds a token, this shard returns an arbitrary
    number for its logit.
    """
    width, dtype = logits.values.shape[1], at_least_float32(logits.values.dtype)
    rows, local_tokens = queries[0], (queries[1] - logits.start).clamp_(0, width - 1)
    row_parts: list[tuple[Tensor, ...]] = []
    for block in blocks(rows.shape[0], width, logits.values.device):
        block_values = logits.values.index_select(0, rows[block])
        row_parts.append(
            (
                *sampler.shard_best(SamplerInput(block_values), count),
                block_values.gather(1, local_tokens[block, None]).to(dtype),
            )
        )
    return row_parts


def scores(logits: ShardedLogits, tokens: Tensor, sampler: Sampler = TORCH) -> Scores:
    """Return the log-probability of each of `tokens` `[q]`, and its rank by probability. Token i is scored by row i of
    this rank's own rows. `logits` are as the head gives them: without penalties, temperature and filters.
    """
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    return Scores(logprobs(logits, rows, tokens, sampler), ranks(logits, tokens))


def ranks(logits: ShardedLogits, tokens: Tensor) -> Tensor:
    """Return, for each of `tokens` `[q]`, how many tokens are at least as likely, itself included. Token i belongs to
    row i of this rank's own rows.
    """
    values, shards = logits.values, logits.shards
    if shards is None:
        return _count_at_least(values, values.gather(1, tokens[:, None]))[:, 0]
    # Only the shard that holds a token has the logit of the token. The call `highest` sends this logit to all shards.
    # Then each shard counts among its own columns, and `add` sums the counts.
    all_tokens = shards.spread(tokens[:, None]) if shards.over_world else tokens[:, None]
    local_tokens, last_column = all_tokens - logits.start, values.shape[1] - 1
    shard_logits = values.gather(1, local_tokens.clamp(0, last_column)).double()
    shard_logits.masked_fill_((local_tokens < 0) | (local_tokens > last_column), float("-inf"))
    counts = shards.add(_count_at_least(values, shards.highest(shard_logits).to(values.dtype)))
    return counts[logits.first_row : logits.first_row + tokens.shape[0], 0]


def _count_at_least(values: Tensor, thresholds: Tensor) -> Tensor:
    """Return `[T, 1]`: how many entries of each row of `values` `[T, v]` are at least `thresholds` `[T, 1]`."""
    row_blocks = blocks(values.shape[0], values.shape[1], values.device)
    return torch.cat([(values[row_block] >= thresholds[row_block]).sum(1, keepdim=True) for row_block in row_blocks])
