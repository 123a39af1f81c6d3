"""Sampling parameters of all requests, on the device."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from cluster.batch import RowSampling, SamplingBatch
from cluster.device.staging import Staging, bits_of
from cluster.request import GREEDY_BELOW
from cluster.sampling.noise import at_least_float32


class SamplingTable:
    """Sampling parameters by request row, on the device: a step gathers its rows instead of copying from the host."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        # Columns of `_floats`: inverse temperature, noise scale, top_p, min_p. Columns of `_ints`: top_k, seed, and the
        # most drafted tokens that a step may accept. This limit stays 0 in the row of idle requests, which pad a batch.
        dtype = at_least_float32(dtype)
        self._floats = torch.zeros(rows, 4, dtype=dtype, device=device)
        self._floats[:, 0] = 1.0
        self._floats[:, 2] = 1.0
        self._ints = torch.zeros(rows, 3, dtype=torch.int64, device=device)

    @staticmethod
    def stage(samplings: Iterable[RowSampling], staging: Staging) -> None:
        """Add the parameters of admitted requests to the next copy to the device; `put` writes them to the table.

        Greedy requests get neutral values, so that greedy and sampled rows share one program.
        """
        rows: list[int] = []
        ints: list[int] = []
        floats: list[float] = []
        for sampling in samplings:
            greedy = sampling.temperature < GREEDY_BELOW
            rows.append(sampling.row)
            ints += (0 if greedy else sampling.top_k, sampling.seed, sampling.max_draft_tokens)
            floats += (
                (1.0, 0.0, 1.0, 0.0) if greedy else (1.0 / sampling.temperature, 1.0, sampling.top_p, sampling.min_p)
            )
        staging.add("sampling rows", rows)
        staging.add("sampling ints", ints)
        staging.add("sampling floats", map(bits_of, floats))

    def put(self, staged: Mapping[str, Tensor]) -> None:
        """Write the parameters that `stage` sent."""
        rows = staged["sampling rows"]
        floats = staged["sampling floats"].view(torch.float64).view(-1, 4)
        self._floats.index_copy_(0, rows, floats.to(self._floats.dtype))
        self._ints.index_copy_(0, rows, staged["sampling ints"].view(-1, 3))

    def take(self, rows: Tensor, any_random: bool, any_filtered: bool) -> SamplingBatch:
        """Return the parameters of table rows `rows` `[B]`; `any_random` and `any_filtered` as in `SamplingBatch`."""
        inverse_temperature, noise_scale, top_p, min_p = self._floats.index_select(0, rows).unbind(1)
        top_k, seeds, limits = self._ints.index_select(0, rows).unbind(1)
        columns = inverse_temperature, noise_scale, top_k, top_p, min_p, seeds
        return SamplingBatch(*columns, any_random, any_filtered, limits)
