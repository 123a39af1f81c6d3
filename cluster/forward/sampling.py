"""Sampling parameters of all requests, on the device."""

import torch
from torch import Tensor

from cluster.batch import Sampling, SamplingBatch
from cluster.forward.noise import at_least_float32
from cluster.request import GREEDY_BELOW


class SamplingTable:
    """Sampling parameters by request row, on the device, so that a step gathers instead of building."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        dtype = at_least_float32(dtype)
        self._floats = torch.zeros(rows, 4, dtype=dtype, device=device)
        self._floats[:, 0] = 1.0
        self._floats[:, 2] = 1.0
        self._ints = torch.zeros(rows, 2, dtype=torch.int64, device=device)
        self._device, self._dtype = device, dtype

    def put(self, s: Sampling) -> None:
        """Write one admitted request's parameters."""
        greedy = s.temperature < GREEDY_BELOW
        scale = 1.0 if greedy else 1.0 / s.temperature
        filters = (1.0, 0.0) if greedy else (s.top_p, s.min_p)
        floats = [scale, 0.0 if greedy else 1.0, *filters]
        self._floats[s.row] = torch.tensor(floats, dtype=self._dtype, device=self._device)
        self._ints[s.row] = torch.tensor([0 if greedy else s.top_k, s.seed], device=self._device)

    def take(self, rows: Tensor, noisy: bool, filtered: bool) -> SamplingBatch:
        """The parameters of `rows` `[B]`."""
        inverse, scale, top_p, min_p = self._floats.index_select(0, rows).unbind(1)
        top_k, seeds = self._ints.index_select(0, rows).unbind(1)
        return SamplingBatch(inverse, scale, top_k, top_p, min_p, seeds, noisy, filtered)
