"""The sampler by Triton kernels, for GPUs: scores, noise included, are computed in registers and never written.

Results must equal those of `TorchSampler`, except for the last digits of noise.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.kernels.choice import gpu
from cluster.kernels.filters import gpu as filters
from cluster.kernels.launch import INTERPRETED, WIDE, launch, warps, whole
from cluster.sampling.filters import MASS
from cluster.sampling.noise import Noise, at_least_float32
from cluster.sampling.sampling_inputs import SamplerInput, SamplingInputs
from cluster.sampling.token_bitmask import barred
from cluster.sampling.torch_sampler import FAR, first_of_nan

COLUMNS = 4096  # columns of a row per program
AT_ONCE = 2048  # columns of a row per iteration of the program that computes thresholds


class TritonSampler:
    """`Sampler` by Triton kernels."""

    def noise(self, seeds: Tensor, first: Tensor, count: int, hashes: Tensor, dtype: torch.dtype) -> Noise:
        """Compute the keys only; see `Sampler.noise`."""
        requests, first = first.shape[0], first.contiguous()
        keys = first.new_empty(requests, count)
        arguments = gpu.KeysAlongArguments(seeds, first, keys, seeds.stride(0), count)
        launch(gpu.keys_along, (requests,), arguments, BLOCK=whole(count))
        return Noise(keys, hashes, dtype)

    def best(self, rows: SamplerInput) -> tuple[Tensor, Tensor]:
        """Return the best column and its score; see `Sampler.best`."""
        scores, columns, _ = self._found(rows, 1, summed=False)
        return columns[:, 0], scores[:, 0]

    def likeliest(self, rows: SamplerInput, count: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and columns of the best; see `Sampler.likeliest`."""
        scores, columns, total = self._found(rows, count, summed=True)
        likely = scores - total.masked_fill(total.isinf(), float("nan"))
        return likely, first_of_nan(likely, columns)

    def found(self, rows: SamplerInput, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best of a shard and its log-sum-exp; see `Sampler.found`."""
        return self._found(rows, min(count, rows.values.shape[1]), summed=True)

    def _found(self, inputs: SamplerInput, count: int, summed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores and columns `[T, count]`, and the log-sum-exp `[T, 1]`, which is computed only if `summed`."""
        values, draws, least, masks = inputs
        values = values if masks is None else barred(values, masks, None)
        rows, size = values.shape
        if not 1 <= count <= size:
            raise ValueError(f"{count} of {size} columns")
        values, wide = values if values.stride(1) == 1 else values.contiguous(), at_least_float32(values.dtype)
        noisy = bool(draws) and draws[0].noise is not None
        noise = _row_noise(values, draws, least) if noisy else RowNoise()
        # Two kernels: the best `count` of each part of a row, then the best of all parts.
        block = min(COLUMNS, whole(size))
        parts = -(-size // block)
        part_scores = values.new_empty(rows, parts, count, dtype=wide)
        part_columns = values.new_empty(rows, parts, count, dtype=torch.int32)
        sums = values.new_empty(rows, parts, 2, dtype=wide)
        launch(
            gpu.best_of_part,
            (rows, parts),
            gpu.BestOfPartArguments(
                values, *noise, part_scores, part_columns, sums, stride=values.stride(0), columns=size, far=FAR
            ),
            NOISY=noisy,
            FILTERED=noise.least is not None,
            SUMMED=summed,
            COUNT=count,
            WIDE=WIDE[wide],
            BLOCK=block,
        )
        scores, total = values.new_empty(rows, count, dtype=wide), values.new_empty(rows, 1, dtype=wide)
        columns = values.new_empty(rows, count, dtype=torch.int64)
        launch(
            gpu.best_of_all,
            (rows,),
            gpu.BestOfAllArguments(part_scores, part_columns, sums, scores, columns, total, parts, size),
            SUMMED=summed,
            COUNT=count,
            WIDE=WIDE[wide],
            PARTS=whole(parts),
            BLOCK=whole(parts * count),
        )
        return scores, columns, total


class RowNoise(NamedTuple):
    """Inverse temperature, noise scale and noise key of each row, the token hashes, and the filters' thresholds. All
    are None if no row is sampled, and `least` is None without filters.
    """

    inverse: Tensor | None = None
    scale: Tensor | None = None
    keys: Tensor | None = None
    hashes: Tensor | None = None
    least: Tensor | None = None


def _row_noise(values: Tensor, draws: Sequence[SamplingInputs], least: Tensor | None) -> RowNoise:
    """Return the noise of the rows of `values`.

    Raises:
        ValueError: noise or `draws` do not fit the columns or rows of `values`. The kernels do not check this.
    """
    noise, start = draws[0].noise, 0
    assert noise is not None, "all requests share a mode"
    if noise.hashes.shape[0] != values.shape[1]:
        raise ValueError(f"noise of {noise.hashes.shape[0]} tokens for {values.shape[1]} columns")
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    kept: list[Tensor] = []
    for draw in draws:
        sampling, stop = draw.sampling, start + draw.requests * draw.each
        parts.append((draw.by_row(sampling.inverse_temperature), draw.by_row(sampling.noise_scale), draw.keys()))
        if least is None and stop > start and sampling.filtered:
            kept.append(least_kept(values[start:stop], draw))
        start = stop
    if start != values.shape[0]:
        raise ValueError(f"{values.shape[0]} rows of logits, and draws of {start}")
    inverse, scale, keys = (torch.cat(column) for column in zip(*parts, strict=True))
    least = torch.cat(kept) if kept else least
    return RowNoise(inverse, scale, keys, noise.hashes.contiguous(), None if least is None else least.contiguous())


def least_kept(values: Tensor, draw: SamplingInputs) -> Tensor:
    """Return the filters' thresholds `[R n, 1]` for logits `values` `[R n, v]`. They keep the same tokens as those of
    `filters.least_kept`.
    """
    sampling, wide, (rows, size) = draw.sampling, at_least_float32(values.dtype), values.shape
    least = values.new_empty(rows, 1, dtype=wide)
    block = min(AT_ONCE, whole(size))
    launch(
        filters.threshold,
        (rows,),
        filters.ThresholdArguments(
            values,
            # The kernel reads neighbouring numbers; with one row per request these are views of the table's rows.
            inverse=draw.by_row(sampling.inverse_temperature).contiguous(),
            top_k=draw.by_row(sampling.top_k).contiguous(),
            top_p=draw.by_row(sampling.top_p).contiguous(),
            log_min_p=draw.by_row(sampling.min_p.log()).contiguous(),
            least=least,
            stride=values.stride(0),
            columns=size,
        ),
        MASS=MASS,
        LIBRARY=not INTERPRETED,
        WIDE=WIDE[wide],
        BLOCK=block,
        num_warps=warps(block, 256),
    )
    return least
