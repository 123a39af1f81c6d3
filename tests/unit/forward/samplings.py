"""Sampling batches for direct calls."""

from dataclasses import replace

import torch

from cluster.batch import Sampling, SamplingBatch
from cluster.forward.sampling import SamplingTable
from cluster.request import SamplingParams
from cluster.staging import Staging


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
