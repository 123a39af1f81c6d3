"""Sampling inputs: how rows of logits become tokens (penalties and grammars, temperature, filters, noise)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.sampling.logits_processor import LogitsProcessor
from cluster.sampling.noise import Noise

WORDS = 6
"""64-bit numbers per row that ranks exchange: inverse temperature, noise scale, top_p, min_p, top_k, noise key."""


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Sampling inputs of R requests with `each` rows of logits per request.

    `noise` covers m positions of each request; it is None if no request of the step samples. Row i of request r has
    the noise number `which[r, i]` (`which` is `[R, each]`). If `which` is None, row i has noise number i; if m is 1,
    all rows have number 0. `adjust` applies penalties and grammars; it is None if no request of the step has any.
    """

    each: int
    sampling: SamplingBatch
    noise: Noise | None
    which: Tensor | None = None
    adjust: LogitsProcessor | None = None

    @property
    def requests(self) -> int:
        """R."""
        return self.sampling.seeds.shape[0]

    def of(self, block: slice) -> "SamplingInputs":
        """Return the inputs of the requests in `block`, for logits that are adjusted already: `adjust` is not used."""
        if self.noise is None or block.stop - block.start == self.requests:
            return self
        which = None if self.which is None else self.which[block]
        sampling = self.sampling.narrow(block.start, block.stop)
        return SamplingInputs(self.each, sampling, self.noise.narrow(block), which)

    def by_row(self, numbers: Tensor) -> Tensor:
        """Repeat a number of each request, `[R]`, for each of its rows, `[R * each]`."""
        return numbers[:, None].expand(self.requests, self.each).reshape(-1)

    def keys(self) -> Tensor:
        """Return the noise key of each row, `[R * each]`."""
        assert self.noise is not None, "nobody samples"
        keys = self.noise.keys
        if self.which is not None:
            return keys.gather(1, self.which).view(-1)
        return keys.expand(self.requests, self.each).reshape(-1)


class SamplerInput(NamedTuple):
    """The input of a `Sampler`: logits `values` `[T, v]`, and how their scores are computed, in float32 at least.

    `draws` are the sampling inputs of the T rows, in order; if `draws` is empty, the scores are the logits. `least`
    `[T, 1]` are the lowest tempered logits that filters keep; it is given only if this rank cannot compute them alone.
    `masks` are token bitmasks of grammars, int32 `[T, words]` with a bit for each column: the result is the same as for
    logits to which `barred` applied the masks. Masks are given only if no request has filters.
    """

    values: Tensor
    draws: Sequence[SamplingInputs] = ()
    least: Tensor | None = None
    masks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PhaseSampling:
    """Sampling inputs of requests for a whole step; `noise` covers all positions at which the step may need tokens."""

    sampling: SamplingBatch
    noise: Noise | None
    adjust: LogitsProcessor | None

    def narrow(self, start: int, stop: int) -> "PhaseSampling":
        """Return the inputs of requests `start` to `stop - 1`."""
        noise = None if self.noise is None else self.noise.narrow(slice(start, stop))
        adjust = None if self.adjust is None else self.adjust.narrow(slice(start, stop))
        return PhaseSampling(self.sampling.narrow(start, stop), noise, adjust)

    def at(self, position: int, each: int = 1, path: Tensor | None = None) -> SamplingInputs:
        """Return the inputs of `each` rows per request that all sample the token at noise number `position`.

        `path` `[R, each, D]` are the uncommitted tokens before that token; only penalties and grammars need them.
        """
        noise = None if self.noise is None else self.noise.at(position)
        return SamplingInputs(each, self.sampling, noise, None, self._after(path))

    def along(self, each: int, positions: int, which: Tensor | None, path: Tensor | None) -> SamplingInputs:
        """Return the inputs of `each` rows per request, at the first `positions` noise numbers; `which` as in
        `SamplingInputs`, `path` as in `at`.
        """
        noise = None if self.noise is None else self.noise.at(0, positions)
        return SamplingInputs(each, self.sampling, noise, which, self._after(path))

    def next(self, which: Tensor) -> SamplingInputs:
        """Return the inputs of one row per request, whose token has noise number `which` `[R]`."""
        return SamplingInputs(
            1, self.sampling, None if self.noise is None else self.noise.pick(which), None, self.adjust
        )

    def _after(self, path: Tensor | None) -> LogitsProcessor | None:
        return self.adjust if self.adjust is None or path is None else self.adjust.after(path)


def words_of(draws: Sequence[SamplingInputs]) -> Tensor:
    """Return the sampling inputs of the T rows of `draws` as int64 `[T, WORDS]`; floats are stored as float64 bits."""
    parts = []
    for draw in draws:
        s = draw.sampling
        floats = [draw.by_row(one).double() for one in (s.inverse_temperature, s.noise_scale, s.top_p, s.min_p)]
        bits = [one.view(torch.int64) for one in floats]
        parts.append(torch.stack([*bits, draw.by_row(s.top_k), draw.keys()], 1))
    return torch.cat(parts)


def checksum(draws: Sequence[SamplingInputs], real: Sequence[Tensor]) -> Tensor:
    """Return a checksum `[1]` of the sampling inputs, which ranks compare. `real` has one mask `[R]` per entry of
    `draws`: False for idle requests, because they share table cells whose content may differ between ranks.
    """
    rows = torch.cat([draw.by_row(some) for draw, some in zip(draws, real, strict=True)])
    words = words_of(draws).mul_(rows[:, None]).view(-1)
    # Sum of word i times (2 i + 1), modulo 2^64: odd weights, so that every bit counts, and the order counts.
    weights = torch.arange(words.shape[0], device=words.device).mul_(2).add_(1)
    return words.mul_(weights).sum(0, keepdim=True)


def draw_of(words: Tensor, like: SamplingInputs) -> SamplingInputs:
    """Inverse of `words_of`: return the rows as requests with one row each; dtypes, token hashes and flags are those of
    `like`. Seeds are zero, as the keys already contain them.
    """
    assert like.noise is not None, "nobody samples"
    sampling, noise = like.sampling, like.noise
    floats = words.view(torch.float64)[:, :4].to(sampling.inverse_temperature.dtype)
    inverse, scale, top_p, min_p = floats.unbind(1)
    top_k, keys = words[:, 4], words[:, 5]
    one = SamplingBatch(inverse, scale, top_k, top_p, min_p, torch.zeros_like(keys), sampling.noisy, sampling.filtered)
    return SamplingInputs(1, one, Noise(keys[:, None], noise.hashes, noise.dtype))
