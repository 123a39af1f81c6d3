"""How the rows of some requests draw their tokens: adjustments, temperature, filters, and which noise each row has."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.sampling.logits_processor import LogitsProcessor
from cluster.sampling.noise import Noise

WORDS = 6
"""64-bit numbers that say how a row draws: inverse temperature, noise scale, top_p, min_p, top_k, its noise's key."""


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """R requests with `each` rows of logits. `noise` is at m positions of each request; None when no request samples.

    Row i of a request has the noise at its position `which[:, i]`, `[R, each]`. `which` is None where all rows share
    one position, or row i has the i-th. `adjust` is None when no request of the step has adjustments.
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
        """That of some requests, which often are all of them, whose logits are adjusted already."""
        if self.noise is None or block.stop - block.start == self.requests:
            return self
        which = None if self.which is None else self.which[block]
        sampling = self.sampling.narrow(block.start, block.stop)
        return SamplingInputs(self.each, sampling, self.noise.narrow(block), which)

    def by_row(self, numbers: Tensor) -> Tensor:
        """A number of each request `[R]`, for each of its rows, `[R * each]`."""
        return numbers[:, None].expand(self.requests, self.each).reshape(-1)

    def keys(self) -> Tensor:
        """The key of each row's noise, `[R * each]`."""
        assert self.noise is not None, "nobody samples"
        keys = self.noise.keys
        if self.which is not None:
            return keys.gather(1, self.which).view(-1)
        return keys.expand(self.requests, self.each).reshape(-1)


@dataclass(frozen=True, slots=True)
class PhaseSampling:
    """How requests draw in a phase of a step. `noise` is that at the positions which their next tokens may have."""

    sampling: SamplingBatch
    noise: Noise | None
    adjust: LogitsProcessor | None

    def narrow(self, start: int, stop: int) -> "PhaseSampling":
        """That of requests `start` to `stop - 1`."""
        noise = None if self.noise is None else self.noise.narrow(slice(start, stop))
        adjust = None if self.adjust is None else self.adjust.narrow(slice(start, stop))
        return PhaseSampling(self.sampling.narrow(start, stop), noise, adjust)

    def at(self, position: int, each: int = 1, path: Tensor | None = None) -> SamplingInputs:
        """How `each` rows of every request draw the tokens at one position, after `path` `[R, each, D]`, which only
        adjustments need.
        """
        noise = None if self.noise is None else self.noise.at(position)
        return SamplingInputs(each, self.sampling, noise, None, self._after(path))

    def along(self, each: int, positions: int, which: Tensor | None, path: Tensor | None) -> SamplingInputs:
        """How `each` rows of every request draw, at the first `positions`; `which` as in `SamplingInputs`, `path` as in
        `at`.
        """
        noise = None if self.noise is None else self.noise.at(0, positions)
        return SamplingInputs(each, self.sampling, noise, which, self._after(path))

    def next(self, which: Tensor) -> SamplingInputs:
        """How every request draws its next token, at position `which` `[R]`."""
        return SamplingInputs(
            1, self.sampling, None if self.noise is None else self.noise.pick(which), None, self.adjust
        )

    def _after(self, path: Tensor | None) -> LogitsProcessor | None:
        return self.adjust if self.adjust is None or path is None else self.adjust.after(path)


def words_of(draws: Sequence[SamplingInputs]) -> Tensor:
    """How each of their T rows draws, as int64 `[T, WORDS]`; floats as the bits of float64."""
    parts = []
    for draw in draws:
        s = draw.sampling
        floats = [draw.by_row(one).double() for one in (s.inverse_temperature, s.noise_scale, s.top_p, s.min_p)]
        bits = [one.view(torch.int64) for one in floats]
        parts.append(torch.stack([*bits, draw.by_row(s.top_k), draw.keys()], 1))
    return torch.cat(parts)


def checksum(draws: Sequence[SamplingInputs], real: Sequence[Tensor]) -> Tensor:
    """One number, `[1]`, that tells whether rows are drawn elsewhere as they are here. `real` `[R]` says of each draw's
    requests which are not idle: what idle ones draw is nobody's, and cells that they share may differ.
    """
    rows = torch.cat([draw.by_row(some) for draw, some in zip(draws, real, strict=True)])
    words = words_of(draws).mul_(rows[:, None]).view(-1)
    weights = torch.arange(words.shape[0], device=words.device).mul_(2).add_(1)
    return words.mul_(weights).sum(0, keepdim=True)


def draw_of(words: Tensor, like: SamplingInputs) -> SamplingInputs:
    """The rows that `words_of` describes, each as a request of its own; dtypes, tokens and filtering are as of `like`.

    Seeds are left out: they are in the keys.
    """
    assert like.noise is not None, "nobody samples"
    sampling, noise = like.sampling, like.noise
    floats = words.view(torch.float64)[:, :4].to(sampling.inverse_temperature.dtype)
    inverse, scale, top_p, min_p = floats.unbind(1)
    top_k, keys = words[:, 4], words[:, 5]
    one = SamplingBatch(inverse, scale, top_k, top_p, min_p, torch.zeros_like(keys), sampling.noisy, sampling.filtered)
    return SamplingInputs(1, one, Noise(keys[:, None], noise.hashes, noise.dtype))
