"""The `Sampler` protocol (a sampler finds the best tokens of rows of logits that a rank holds), and its implementation
by torch operators.

Rows are processed in blocks of a bounded number of logits, so that no temporary has the size of all rows times the
vocabulary. Legend: R requests, n rows of each, T rows, V token ids, v columns on this rank.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.sampling.filters import TEMPORARIES_PER_LOGIT, filter_thresholds
from cluster.sampling.noise import Noise, at_least_float32, keys_along
from cluster.sampling.row_blocks import blocks
from cluster.sampling.sampling_inputs import SamplerInput, SamplingInputs
from cluster.sampling.token_bitmask import apply_token_bitmask

FILTERED_PENALTY = 64.0
"""Subtracted from the scores of tokens that a filter removes. Noise values differ by 26 at most, so these tokens get
lower scores than all tokens that are kept, and their probability is too small to matter to a draft. The order of the
removed tokens does not change.
"""


class Sampler(Protocol):
    """Finds the best columns of rows of logits, by their scores."""

    def noise(self, seeds: Tensor, first_positions: Tensor, count: int, hashes: Tensor, dtype: torch.dtype) -> Noise:
        """Return the noise of requests with `seeds` `[B]` at `count` positions from `first_positions` `[B]` on, for the
        tokens with `hashes` `[v]`.
        """

    def best(self, sampler_input: SamplerInput) -> tuple[Tensor, Tensor]:
        """Return the column of the highest score, and that score, `[T]` each.

        NaN and +inf count as highest, so the returned score tells whether any logit of the row was NaN or +inf. The
        lowest column wins a tie.
        """

    def top_logprobs(self, sampler_input: SamplerInput, count: int) -> tuple[Tensor, Tensor]:
        """Return the log-softmax of the scores for the `count` best columns, and these columns, `[T, count]` each.

        For a row whose log-softmax is NaN, the columns are 0 to `count - 1`.
        """

    def shard_best(self, sampler_input: SamplerInput, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the `count` best scores and their columns, `[T, count]` each, and the log-sum-exp of the scores of the
        v columns, `[T, 1]`. The input has no `masks`. The shards of a vocabulary merge these results into
        log-probabilities.

        If `draws` is empty, the lower column comes first in a tie, and the results of a row, to the bit, do not depend
        on the number of rows.
        """


class TorchSampler:
    """`Sampler` by torch operators: the reference implementation."""

    def noise(self, seeds: Tensor, first_positions: Tensor, count: int, hashes: Tensor, dtype: torch.dtype) -> Noise:
        """Return the noise, with its values if there are few; see `Noise.of`."""
        keys = keys_along(seeds, first_positions, count)
        return Noise.of(keys, hashes, dtype)

    def best(self, sampler_input: SamplerInput) -> tuple[Tensor, Tensor]:
        """Take the maximum of the scores, block by block; see `Sampler.best`."""
        best_scores, best_columns = reduce_by_block(sampler_input, lambda scores: tuple(scores.max(-1)))
        return best_columns, best_scores.to(at_least_float32(best_scores.dtype))

    def top_logprobs(self, sampler_input: SamplerInput, count: int) -> tuple[Tensor, Tensor]:
        """Take the log-softmax of the scores and its top `count`, block by block; see `Sampler.top_logprobs`."""
        score_dtype = at_least_float32(sampler_input.logits.dtype)
        log_probabilities, columns = reduce_by_block(
            sampler_input, lambda scores: tuple(scores.log_softmax(-1, dtype=score_dtype).topk(count, -1))
        )
        return log_probabilities, columns_without_nan(log_probabilities, columns)

    def shard_best(self, sampler_input: SamplerInput, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Take the top `count` and the log-sum-exp of the scores, block by block; see `Sampler.shard_best`."""
        score_dtype, reduction = (
            at_least_float32(sampler_input.logits.dtype),
            top_and_logsumexp if sampler_input.draws else top_in_column_order,
        )
        top, columns, total = reduce_by_block(sampler_input, lambda scores: reduction(scores.to(score_dtype), count))
        return top, columns, total


TORCH = TorchSampler()


def score_logits(
    logits: Tensor,
    sampling: SamplingBatch,
    noise: Noise,
    noise_index: Tensor | None = None,
    thresholds: Tensor | None = None,
) -> Tensor:
    """Return the scores `[R, n, v]`: filtered, tempered logits plus noise. The token with the highest score is chosen.

    `noise_index` is as in `SamplingInputs`. `thresholds` `[R, n, 1]` are the filters' thresholds. If `thresholds` is
    None, they are computed here, which needs all columns of a row.
    """
    noise_values = noise.values(noise_index)
    # score = logit / temperature - FILTERED_PENALTY [if filtered out] + noise_scale * noise; greedy rows have scale 0.
    tempered = logits.to(noise_values.dtype) * sampling.inverse_temperature[:, None, None]
    if sampling.any_filtered:
        tempered.add_(
            tempered < (filter_thresholds(tempered, sampling) if thresholds is None else thresholds),
            alpha=-FILTERED_PENALTY,
        )
    return tempered.addcmul_(noise_values, sampling.noise_scale[:, None, None])


Reduction = Callable[[Tensor], tuple[Tensor, ...]]
"""A reduction over the last dimension of the scores `[.., v]` of some rows."""


def reduce_by_block(sampler_input: SamplerInput, reduction: Reduction) -> tuple[Tensor, ...]:
    """Apply `reduction` to the scores of all rows, block by block, and return its results for all rows. If no request
    samples, the scores are the logits (with masks applied, if any).
    """
    values, sampling_inputs, thresholds, masks = sampler_input
    values = values if masks is None else apply_token_bitmask(values, masks, None)
    columns, device = values.shape[1], values.device
    if not sampling_inputs or sampling_inputs[0].noise is None:
        return concat_results([reduction(values[block]) for block in blocks(values.shape[0], columns, device)])
    block_results, start = [], 0
    for inputs in [inputs_of_draw for inputs_of_draw in sampling_inputs if inputs_of_draw.requests] or sampling_inputs[
        :1
    ]:
        assert inputs.noise is not None, "all requests share a mode"
        requests, rows_per_request = inputs.requests, inputs.rows_per_request
        logits = values[start : start + requests * rows_per_request].view(requests, rows_per_request, columns)
        draw_thresholds = (
            None
            if thresholds is None
            else thresholds[start : start + requests * rows_per_request].view(requests, rows_per_request, 1)
        )
        for block in blocks(requests, (rows_per_request + inputs.noise.keys.shape[1]) * columns, device):
            block_inputs, block_thresholds = (
                inputs.narrow(block),
                None if draw_thresholds is None else draw_thresholds[block],
            )
            assert block_inputs.noise is not None, "part of some noise"
            block_results.append(
                reduction(
                    score_logits(
                        logits[block],
                        block_inputs.sampling,
                        block_inputs.noise,
                        block_inputs.noise_index,
                        block_thresholds,
                    ).view(-1, columns)
                )
            )
        start += requests * rows_per_request
    return concat_results(block_results)


def top_and_logsumexp(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `count` best of each row of `scores` `[T, v]` (all if v is less than `count`), their columns, and the
    log-sum-exp of each row, `[T, 1]`.
    """
    top = scores.topk(min(count, scores.shape[1]), -1)
    return top.values, top.indices, scores.logsumexp(-1, keepdim=True)


def top_in_column_order(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `top_and_logsumexp` returns for `scores` `[T, v]`, with two differences: tied scores are in order of
    columns, and the results of a row, to the bit, do not depend on T.
    """
    column_count, device = scores.shape[1], scores.device
    padded_scores = (
        scores if scores.shape[0] > 1 else torch.cat([scores, scores])
    )  # torch sums a single row in another order
    top, columns, total = top_and_logsumexp(padded_scores, count)
    top, columns, total = (result[: scores.shape[0]] for result in (top, columns, total))
    # If more columns have the lowest value in `top` than places are left, it is undefined which of them `topk` took.
    # Take those with the lowest numbers instead, that is, with the greatest `column_count - column`. In `top` they come
    # after all columns of greater value.
    is_tie, column_numbers = top == top[:, -1:], torch.arange(column_count, device=device)
    lowest_columns = torch.where(scores == top[:, -1:], column_count - column_numbers, 0).topk(top.shape[1], -1).values
    tie_index = (column_numbers[: top.shape[1]] - is_tie.logical_not().sum(1, keepdim=True)).clamp_(min=0)
    columns = torch.where(is_tie, column_count - lowest_columns.gather(1, tie_index), columns)
    # Sort by column, then stably by value: ties stay in order of columns.
    columns, column_order = columns.sort(1)
    top, value_order = top.gather(1, column_order).sort(dim=1, descending=True, stable=True)
    return top, columns.gather(1, value_order), total


def concat_results(block_results: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return each result for all rows, from the results of blocks of rows."""
    return (
        block_results[0]
        if len(block_results) == 1
        else tuple(torch.cat(results) for results in zip(*block_results, strict=True))
    )


def columns_without_nan(log_probabilities: Tensor, columns: Tensor) -> Tensor:
    """Return `columns` with 0, 1, 2, .. where `log_probabilities` is NaN, because the columns of NaN are undefined."""
    return torch.where(
        log_probabilities == log_probabilities,
        columns,
        _column_numbers(log_probabilities.shape[-1], log_probabilities.device),
    )


@cache
def _column_numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def row_thresholds(values: Tensor, inputs: SamplingInputs) -> Tensor | None:
    """Return the filters' thresholds `[R n, 1]` for logits `values` `[R n, v]`; None if no request has filters."""
    if not inputs.sampling.any_filtered:
        return None
    block_thresholds, columns = [], values.shape[1]
    logits = values.view(inputs.requests, inputs.rows_per_request, columns)
    for block in blocks(inputs.requests, TEMPORARIES_PER_LOGIT * inputs.rows_per_request * columns, values.device):
        sampling = inputs.sampling.narrow(block.start, block.stop)
        tempered = logits[block].to(at_least_float32(values.dtype)) * sampling.inverse_temperature[:, None, None]
        block_thresholds.append(filter_thresholds(tempered, sampling).view(-1, 1))
    return torch.cat(block_thresholds)
