"""Sampling batches for direct calls of samplers, and token choice from one rank's complete logits."""

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
    """Return a batch of requests with the same parameters, `options`, as the engine's sampling table returns it."""
    params = RequestParams(**options)  # type: ignore[arg-type]
    table = SamplingTable(1, dtype, torch.device("cpu"))
    staging = Staging(torch.device("cpu"))
    table.stage([RowSampling(0, params.temperature, params.top_k, params.top_p, params.min_p, 0)], staging)
    table.put(staging.send().lists())
    is_random = params.temperature > 0
    has_filters = is_random and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    batch = table.take(torch.zeros(requests, dtype=torch.int64), is_random, has_filters)
    return replace(batch, seeds=torch.arange(requests) if seeds is None else seeds)


def single_rank_logits(logits: Tensor) -> ShardedLogits:
    """Return logits `[.., V]` in the form that a head returns on a single rank."""
    return ShardedLogits(logits.reshape(-1, logits.shape[-1]), logits.shape[-1])


def chosen(
    logits: Tensor,
    sampling: SamplingBatch,
    noise: Noise | None,
    noise_index: Tensor | None = None,
    sampler: Sampler = TORCH,
) -> tuple[Tensor, Tensor]:
    """Return the chosen tokens and their scores, `[R, n]` each, from logits `[R, n, V]` of n rows per request."""
    tokens, scores = choose(
        single_rank_logits(logits), [SamplingInputs(logits.shape[1], sampling, noise, noise_index)], sampler
    )
    return tokens.view(logits.shape[:2]), scores.view(logits.shape[:2])


def top_tokens(
    logits: Tensor, sampling: SamplingBatch, noise: Noise | None, count: int, sampler: Sampler = TORCH
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and columns, `[R, n, count]` each, of the `count` most likely tokens of each row of
    logits `[R, n, V]`.
    """
    log_probs, columns = top_logprobs(
        single_rank_logits(logits), SamplingInputs(logits.shape[1], sampling, noise), count, sampler
    )
    return log_probs.view(*logits.shape[:2], count), columns.view(*logits.shape[:2], count)


def apply_filters(tempered: Tensor, sampling: SamplingBatch) -> Tensor:
    """Return tempered logits `[R, n, V]` with -inf for the tokens that the filters remove."""
    return tempered.masked_fill(tempered < filter_thresholds(tempered, sampling), float("-inf"))
