"""Sampling batches for direct calls."""

import torch

from cluster.batch import SamplingBatch
from cluster.forward.sampler import SamplingTable
from cluster.request import SamplingParams

Options = dict[str, float | int]


def sampling_of(
    requests: int, seeds: torch.Tensor | None = None, dtype: torch.dtype = torch.float64, **options: float
) -> SamplingBatch:
    """The same parameters for every request, as the engine's own table gives them."""
    params = SamplingParams(**options)  # type: ignore[arg-type]
    table = SamplingTable(requests, dtype, torch.device("cpu"))
    given = range(requests) if seeds is None else seeds.tolist()
    for row, seed in zip(range(requests), given, strict=True):
        table.put(row, params, seed)
    noisy = params.temperature > 0
    filtered = noisy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    return table.take(torch.arange(requests), noisy, filtered)
