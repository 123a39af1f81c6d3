"""Sampling inputs: how rows of logits become tokens (penalties and grammars, temperature, filters, noise)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.sampling.logits_processor import LogitsProcessor
from cluster.sampling.noise import Noise

PACKED_NUMBERS = 6
"""64-bit numbers per row that ranks exchange: inverse temperature, noise scale, top_p, min_p, top_k, noise key."""


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Sampling inputs of R requests with `rows_per_request` rows of logits per request.

    `noise` covers m positions of each request; it is None if no request of the step samples. The noise number of a row
    says for which of the m positions the row chooses a token. Row i of request r has the noise number
    `noise_index[r, i]`; `noise_index` is `[R, rows_per_request]`. If `noise_index` is None, row i has noise number i
    or, if m is 1, number 0. `processor` applies penalties and grammars; it is None if no request of the step has any.
    """

    rows_per_request: int
    sampling: SamplingBatch
    noise: Noise | None
    noise_index: Tensor | None = None
    processor: LogitsProcessor | None = None

    @property
    def requests(self) -> int:
        """R, the number of requests."""
        return self.sampling.seeds.shape[0]

    def narrow(self, requests: slice) -> "SamplingInputs":
        """Return the inputs of the requests in `requests`, without `processor`: the logits must be adjusted already.
        Without noise no row is sampled, and the inputs of all requests are returned.
        """
        if self.noise is None or requests.stop - requests.start == self.requests:
            return self
        noise_index = None if self.noise_index is None else self.noise_index[requests]
        sampling = self.sampling.narrow(requests.start, requests.stop)
        return SamplingInputs(self.rows_per_request, sampling, self.noise.narrow(requests), noise_index)

    def by_row(self, numbers: Tensor) -> Tensor:
        """Return `numbers` `[R]`, one per request, repeated for each row of the request: `[R * rows_per_request]`."""
        return numbers[:, None].expand(self.requests, self.rows_per_request).reshape(-1)

    def keys(self) -> Tensor:
        """Return the noise key of each row, `[R * rows_per_request]`."""
        assert self.noise is not None, "nobody samples"
        keys = self.noise.keys
        if self.noise_index is not None:
            return keys.gather(1, self.noise_index).view(-1)
        return keys.expand(self.requests, self.rows_per_request).reshape(-1)


class SamplerInput(NamedTuple):
    """The input of a `Sampler`: `logits` `[T, v]`, and how their scores are computed, in float32 at least.

    `draws` are the sampling inputs of the T rows, in order; if `draws` is empty, the scores are the logits.
    `thresholds` `[T, 1]` are the lowest tempered logits that filters keep. They are given only if the vocabulary is
    sharded; otherwise the sampler computes them. `masks` are token bitmasks of grammars, int32 `[T, words]`, with a bit
    for each column. The sampler must return what it would return for logits to which `apply_token_bitmask` has applied
    the masks. Masks are given only if no request has filters.
    """

    logits: Tensor
    draws: Sequence[SamplingInputs] = ()
    thresholds: Tensor | None = None
    masks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PhaseSampling:
    """Sampling inputs of requests for a whole step; `noise` covers all positions at which the step may need tokens."""

    sampling: SamplingBatch
    noise: Noise | None
    processor: LogitsProcessor | None

    def narrow(self, start: int, stop: int) -> "PhaseSampling":
        """Return the inputs of requests `start` to `stop - 1`."""
        noise = None if self.noise is None else self.noise.narrow(slice(start, stop))
        processor = None if self.processor is None else self.processor.narrow(slice(start, stop))
        return PhaseSampling(self.sampling.narrow(start, stop), noise, processor)

    def at_position(self, position: int, rows_per_request: int = 1, path: Tensor | None = None) -> SamplingInputs:
        """Return the inputs of `rows_per_request` rows per request. All these rows have the noise number `position`.

        `path` `[R, rows_per_request, D]` are the uncommitted tokens before the token of each row; only penalties and
        grammars need them.
        """
        noise = None if self.noise is None else self.noise.at(position)
        return SamplingInputs(rows_per_request, self.sampling, noise, None, self._after(path))

    def along_positions(
        self, rows_per_request: int, positions: int, noise_index: Tensor | None, path: Tensor | None
    ) -> SamplingInputs:
        """Return the inputs of `rows_per_request` rows per request, whose noise numbers are below `positions`.
        `noise_index` is as in `SamplingInputs`, `path` as in `at_position`.
        """
        noise = None if self.noise is None else self.noise.at(0, positions)
        return SamplingInputs(rows_per_request, self.sampling, noise, noise_index, self._after(path))

    def of_rows(self, requests: Tensor, noise_index: Tensor, path: Tensor | None) -> SamplingInputs:
        """Return the inputs of M rows as those of M requests with one row each. Row i belongs to request `requests[i]`,
        and has the noise number `noise_index[i]`. `path` `[M, 1, D]` is as in `at_position`.
        """
        noise = None if self.noise is None else self.noise.pick_rows(requests, noise_index)
        processor = None if self.processor is None else self.processor.pick(requests)
        if processor is not None and path is not None:
            processor = processor.after(path)
        return SamplingInputs(1, self.sampling.pick(requests), noise, None, processor)

    def at_position_of_each(self, noise_index: Tensor) -> SamplingInputs:
        """Return the inputs of one row per request. The rows have the noise numbers `noise_index` `[R]`."""
        return SamplingInputs(
            1, self.sampling, None if self.noise is None else self.noise.pick(noise_index), None, self.processor
        )

    def _after(self, path: Tensor | None) -> LogitsProcessor | None:
        return self.processor if self.processor is None or path is None else self.processor.after(path)


def pack_inputs(sampling_inputs: Sequence[SamplingInputs]) -> Tensor:
    """Return the sampling inputs of the T rows of `sampling_inputs` as int64 `[T, PACKED_NUMBERS]`; floats are stored
    as float64 bits.
    """
    packed = []
    for inputs in sampling_inputs:
        sampling = inputs.sampling
        floats = [
            inputs.by_row(values).double()
            for values in (sampling.inverse_temperature, sampling.noise_scale, sampling.top_p, sampling.min_p)
        ]
        bits = [values.view(torch.int64) for values in floats]
        packed.append(torch.stack([*bits, inputs.by_row(sampling.top_k), inputs.keys()], 1))
    return torch.cat(packed)


def checksum(sampling_inputs: Sequence[SamplingInputs], is_real: Sequence[Tensor]) -> Tensor:
    """Return a checksum `[1]` of the sampling inputs, which ranks compare. `is_real` has one mask `[R]` per entry of
    `sampling_inputs`. It is False for idle requests (padding): they do not count, because they share one table row,
    whose content may differ between ranks.
    """
    row_mask = torch.cat([inputs.by_row(mask) for inputs, mask in zip(sampling_inputs, is_real, strict=True)])
    packed = pack_inputs(sampling_inputs).mul_(row_mask[:, None]).view(-1)
    # The sum of word i times (2 i + 1), modulo 2^64. The weights are odd, so every bit of a word matters; they differ,
    # so the order of the words matters too.
    weights = torch.arange(packed.shape[0], device=packed.device).mul_(2).add_(1)
    return packed.mul_(weights).sum(0, keepdim=True)


def unpack_inputs(packed: Tensor, template: SamplingInputs) -> SamplingInputs:
    """Return the sampling inputs that `pack_inputs` has packed, as those of T requests with one row each. Dtypes, token
    hashes and flags are those of `template`. The seeds of the result are zero: they are not needed, because the packed
    rows have the noise keys, which were computed from the seeds.
    """
    assert template.noise is not None, "nobody samples"
    sampling, noise = template.sampling, template.noise
    floats = packed.view(torch.float64)[:, :4].to(sampling.inverse_temperature.dtype)
    inverse_temperature, noise_scale, top_p, min_p = floats.unbind(1)
    top_k, keys = packed[:, 4], packed[:, 5]
    sampling_batch = SamplingBatch(
        inverse_temperature,
        noise_scale,
        top_k,
        top_p,
        min_p,
        torch.zeros_like(keys),
        sampling.any_random,
        sampling.any_filtered,
    )
    return SamplingInputs(1, sampling_batch, Noise(keys[:, None], noise.hashes, noise.dtype))
