"""Sampling batches for direct calls, and choosing from logits that one rank holds whole."""

from dataclasses import replace

import torch
from torch import Tensor

from cluster.batch import Sampling, SamplingBatch
from cluster.device.staging import Staging
from cluster.models.vocab import Columns
from cluster.request import SamplingParams
from cluster.sampling.filters import least_kept
from cluster.sampling.noise import Noise
from cluster.sampling.parameters import SamplingTable
from cluster.sampling.sampler import choose, likeliest
from cluster.sampling.sampling_inputs import Draw
from cluster.sampling.torch_sampler import TORCH, Chooser


def sampling_of(
    requests: int, seeds: torch.Tensor | None = None, dtype: torch.dtype = torch.float64, **options: float
) -> SamplingBatch:
    """The same parameters for every request, as the engine's own table gives them."""
    params = SamplingParams(**options)  # type: ignore[arg-type]
    table = SamplingTable(1, dtype, torch.device("cpu"))
    staging = Staging(torch.device("cpu"))
    table.stage([Sampling(0, params.temperature, params.top_k, params.top_p, params.min_p, 0)], staging)
    table.put(staging.sent().lists())
    noisy = params.temperature > 0
    filtered = noisy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    batch = table.take(torch.zeros(requests, dtype=torch.int64), noisy, filtered)
    return replace(batch, seeds=torch.arange(requests) if seeds is None else seeds)


def whole(logits: Tensor) -> Columns:
    """Logits `[.., V]` as a head gives them on one rank."""
    return Columns(logits.reshape(-1, logits.shape[-1]), logits.shape[-1])


def chosen(
    logits: Tensor,
    sampling: SamplingBatch,
    noise: Noise | None,
    which: Tensor | None = None,
    chooser: Chooser = TORCH,
) -> tuple[Tensor, Tensor]:
    """The tokens after n rows of each request and their scores, `[R, n]` each, from logits `[R, n, V]`."""
    tokens, scores = choose(whole(logits), [Draw(logits.shape[1], sampling, noise, which)], chooser)
    return tokens.view(logits.shape[:2]), scores.view(logits.shape[:2])


def best_of(
    logits: Tensor, sampling: SamplingBatch, noise: Noise | None, count: int, chooser: Chooser = TORCH
) -> tuple[Tensor, Tensor]:
    """The `count` likeliest of each row of logits `[R, n, V]`, `[R, n, count]` each."""
    likely, columns = likeliest(whole(logits), Draw(logits.shape[1], sampling, noise), count, chooser)
    return likely.view(*logits.shape[:2], count), columns.view(*logits.shape[:2], count)


def filtered(tempered: Tensor, sampling: SamplingBatch) -> Tensor:
    """-inf where the filters rule out a token of their tempered logits `[R, n, V]`."""
    return tempered.masked_fill(tempered < least_kept(tempered, sampling), float("-inf"))
