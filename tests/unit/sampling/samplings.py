"""Sampling batches for direct calls, and choosing from logits that one rank holds whole."""

from dataclasses import replace

import torch
from torch import Tensor

from cluster.batch import RowSampling, SamplingBatch
from cluster.device.staging import Staging
from cluster.models.vocab import ShardedLogits
from cluster.request import RequestParams
from cluster.sampling.filters import filter_thresholds
from cluster.sampling.noise import Noise
from cluster.sampling.parameters import SamplingTable
from cluster.sampling.sampler import choose, top_logprobs
from cluster.sampling.sampling_inputs import SamplingInputs
from cluster.sampling.torch_sampler import TORCH, Sampler


def sampling_of(
    requests: int, seeds: torch.Tensor | None = None, dtype: torch.dtype = torch.float64, **options: float
) -> SamplingBatch:
    """The same parameters for every request, as the engine's own table gives them."""
    params = RequestParams(**options)  # type: ignore[arg-type]
    table = SamplingTable(1, dtype, torch.device("cpu"))
    staging = Staging(torch.device("cpu"))
    table.stage([RowSampling(0, params.temperature, params.top_k, params.top_p, params.min_p, 0)], staging)
    table.put(staging.send().lists())
    noisy = params.temperature > 0
    filtered = noisy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    batch = table.take(torch.zeros(requests, dtype=torch.int64), noisy, filtered)
    return replace(batch, seeds=torch.arange(requests) if seeds is None else seeds)


def whole(logits: Tensor) -> ShardedLogits:
    """Logits `[.., V]` as a head gives them on one rank."""
    return ShardedLogits(logits.reshape(-1, logits.shape[-1]), logits.shape[-1])


def chosen(
    logits: Tensor,
    sampling: SamplingBatch,
    noise: Noise | None,
    which: Tensor | None = None,
    sampler: Sampler = TORCH,
) -> tuple[Tensor, Tensor]:
    """The tokens after n rows of each request and their scores, `[R, n]` each, from logits `[R, n, V]`."""
    tokens, scores = choose(whole(logits), [SamplingInputs(logits.shape[1], sampling, noise, which)], sampler)
    return tokens.view(logits.shape[:2]), scores.view(logits.shape[:2])


def best_of(
    logits: Tensor, sampling: SamplingBatch, noise: Noise | None, count: int, sampler: Sampler = TORCH
) -> tuple[Tensor, Tensor]:
    """The `count` likeliest of each row of logits `[R, n, V]`, `[R, n, count]` each."""
    likely, columns = top_logprobs(whole(logits), SamplingInputs(logits.shape[1], sampling, noise), count, sampler)
    return likely.view(*logits.shape[:2], count), columns.view(*logits.shape[:2], count)


def filtered(tempered: Tensor, sampling: SamplingBatch) -> Tensor:
    """-inf where the filters rule out a token of their tempered logits `[R, n, V]`."""
    return tempered.masked_fill(tempered < filter_thresholds(tempered, sampling), float("-inf"))
