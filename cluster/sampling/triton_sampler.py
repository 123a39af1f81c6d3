"""The sampler by Triton kernels, for GPUs: scores, noise included, are computed in registers, not written to memory.

Results must equal those of `TorchSampler`, except for the last digits of noise.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.kernels.choice import gpu
from cluster.kernels.filters import gpu as filters
from cluster.kernels.launch import ACC_DTYPES, INTERPRETED, launch, next_power_of_2, warps
from cluster.sampling.filters import MAX_MASS
from cluster.sampling.noise import Noise, at_least_float32
from cluster.sampling.sampling_inputs import SamplerInput, SamplingInputs
from cluster.sampling.token_bitmask import apply_token_bitmask
from cluster.sampling.torch_sampler import FILTERED_PENALTY, columns_without_nan

COLUMNS_PER_PROGRAM = 4096  # columns of a row per program
COLUMNS_PER_ITERATION = 2048  # columns of a row per iteration of the program that computes thresholds


class TritonSampler:
    """`Sampler` by Triton kernels."""

    def noise(self, seeds: Tensor, first_positions: Tensor, count: int, hashes: Tensor, dtype: torch.dtype) -> Noise:
        """Compute the keys only; see `Sampler.noise`."""
        requests, first_positions = first_positions.shape[0], first_positions.contiguous()
        keys = first_positions.new_empty(requests, count)
        arguments = gpu.KeysAlongArguments(seeds, first_positions, keys, seeds.stride(0), count)
        launch(gpu.keys_along, (requests,), arguments, BLOCK=next_power_of_2(count))
        return Noise(keys, hashes, dtype)

    def best(self, sampler_input: SamplerInput) -> tuple[Tensor, Tensor]:
        """Return the best column and its score; see `Sampler.best`."""
        scores, columns, _ = self._top_scores(sampler_input, 1, with_logsumexp=False)
        return columns[:, 0], scores[:, 0]

    def top_logprobs(self, sampler_input: SamplerInput, count: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and columns of the best; see `Sampler.top_logprobs`."""
        scores, columns, total = self._top_scores(sampler_input, count, with_logsumexp=True)
        log_probabilities = scores - total.masked_fill(total.isinf(), float("nan"))
        return log_probabilities, columns_without_nan(log_probabilities, columns)

    def shard_best(self, sampler_input: SamplerInput, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best of a shard and its log-sum-exp; see `Sampler.shard_best`."""
        return self._top_scores(sampler_input, min(count, sampler_input.logits.shape[1]), with_logsumexp=True)

    def _top_scores(self, inputs: SamplerInput, count: int, with_logsumexp: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores and columns of the best, `[T, count]` each, and the log-sum-exp of the scores, `[T, 1]`, which
        is computed only if `with_logsumexp`.
        """
        values, sampling_inputs, thresholds, masks = inputs
        values = values if masks is None else apply_token_bitmask(values, masks, None)
        rows, column_count = values.shape
        if not 1 <= count <= column_count:
            raise ValueError(f"{count} of {column_count} columns")
        values, score_dtype = values if values.stride(1) == 1 else values.contiguous(), at_least_float32(values.dtype)
        is_random = bool(sampling_inputs) and sampling_inputs[0].noise is not None
        noise = _row_noise(values, sampling_inputs, thresholds) if is_random else RowNoise()
        # Two kernels: the best `count` of each part of a row, then the best of all parts.
        block = min(COLUMNS_PER_PROGRAM, next_power_of_2(column_count))
        parts = -(-column_count // block)
        part_scores = values.new_empty(rows, parts, count, dtype=score_dtype)
        part_columns = values.new_empty(rows, parts, count, dtype=torch.int32)
        sums = values.new_empty(rows, parts, 2, dtype=score_dtype)
        launch(
            gpu.best_of_part,
            (rows, parts),
            gpu.BestOfPartArguments(
                values,
                *noise,
                part_scores,
                part_columns,
                sums,
                stride=values.stride(0),
                columns=column_count,
                filter_penalty=FILTERED_PENALTY,
            ),
            IS_SAMPLED=is_random,
            HAS_FILTERS=noise.thresholds is not None,
            WITH_LOGSUMEXP=with_logsumexp,
            COUNT=count,
            ACC_DTYPE=ACC_DTYPES[score_dtype],
            BLOCK=block,
        )
        scores, total = values.new_empty(rows, count, dtype=score_dtype), values.new_empty(rows, 1, dtype=score_dtype)
        columns = values.new_empty(rows, count, dtype=torch.int64)
        launch(
            gpu.best_of_all,
            (rows,),
            gpu.BestOfAllArguments(part_scores, part_columns, sums, scores, columns, total, parts, column_count),
            WITH_LOGSUMEXP=with_logsumexp,
            COUNT=count,
            ACC_DTYPE=ACC_DTYPES[score_dtype],
            PARTS=next_power_of_2(parts),
            BLOCK=next_power_of_2(parts * count),
        )
        return scores, columns, total


class RowNoise(NamedTuple):
    """Inverse temperature, noise scale and noise key of each row, the token hashes, and the filters' thresholds. All
    are None if no row is sampled, and `thresholds` is None without filters.
    """

    inverse: Tensor | None = None
    scale: Tensor | None = None
    keys: Tensor | None = None
    hashes: Tensor | None = None
    thresholds: Tensor | None = None


def _row_noise(values: Tensor, sampling_inputs: Sequence[SamplingInputs], thresholds: Tensor | None) -> RowNoise:
    """Return the noise of the rows of `values`. If `thresholds` is None, compute the filters' thresholds, if there are
    filters.

    Raises:
        ValueError: noise or `sampling_inputs` do not fit the columns or rows of `values`. The kernels do not check
        this.
    """
    noise, start = sampling_inputs[0].noise, 0
    assert noise is not None, "all requests share a mode"
    if noise.hashes.shape[0] != values.shape[1]:
        raise ValueError(f"noise of {noise.hashes.shape[0]} tokens for {values.shape[1]} columns")
    row_values: list[tuple[Tensor, Tensor, Tensor]] = []
    computed_thresholds: list[Tensor] = []
    for inputs in sampling_inputs:
        sampling, stop = inputs.sampling, start + inputs.requests * inputs.rows_per_request
        row_values.append(
            (inputs.by_row(sampling.inverse_temperature), inputs.by_row(sampling.noise_scale), inputs.keys())
        )
        if thresholds is None and stop > start and sampling.any_filtered:
            computed_thresholds.append(row_thresholds(values[start:stop], inputs))
        start = stop
    if start != values.shape[0]:
        raise ValueError(f"{values.shape[0]} rows of logits, and draws of {start}")
    inverse, scale, keys = (torch.cat(column) for column in zip(*row_values, strict=True))
    thresholds = torch.cat(computed_thresholds) if computed_thresholds else thresholds
    return RowNoise(
        inverse, scale, keys, noise.hashes.contiguous(), None if thresholds is None else thresholds.contiguous()
    )


def row_thresholds(values: Tensor, inputs: SamplingInputs) -> Tensor:
    """Return the filters' thresholds `[R n, 1]` for logits `values` `[R n, v]`. They keep the same tokens as those of
    `filters.filter_thresholds`.
    """
    sampling, score_dtype, (rows, column_count) = inputs.sampling, at_least_float32(values.dtype), values.shape
    thresholds = values.new_empty(rows, 1, dtype=score_dtype)
    block = min(COLUMNS_PER_ITERATION, next_power_of_2(column_count))
    launch(
        filters.threshold,
        (rows,),
        filters.ThresholdArguments(
            values,
            # The kernel needs contiguous tensors. With one row per request, `by_row` may return a strided view.
            inverse_temperature=inputs.by_row(sampling.inverse_temperature).contiguous(),
            top_k=inputs.by_row(sampling.top_k).contiguous(),
            top_p=inputs.by_row(sampling.top_p).contiguous(),
            log_min_p=inputs.by_row(sampling.min_p.log()).contiguous(),
            thresholds=thresholds,
            stride=values.stride(0),
            columns=column_count,
        ),
        MASS=MAX_MASS,
        USE_LIBDEVICE=not INTERPRETED,
        ACC_DTYPE=ACC_DTYPES[score_dtype],
        BLOCK=block,
        num_warps=warps(block, 256),
    )
    return thresholds
