"""How the rows of some requests draw their tokens: temperature, filters, and which noise each row has."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.forward.noise import Noise

WORDS = 6
"""64-bit numbers that say how a row draws: inverse temperature, noise scale, top_p, min_p, top_k, its noise's key."""


@dataclass(frozen=True, slots=True)
class Draw:
    """R requests with `each` rows of logits. `noise` is at m positions of each request; None when no request samples.

    Row i of a request has the noise at its position `which[:, i]`, `[R, each]`. `which` is None where all rows share
    one position, or row i has the i-th.
    """

    each: int
    sampling: SamplingBatch
    noise: Noise | None
    which: Tensor | None = None

    @property
    def requests(self) -> int:
        """R."""
        return self.sampling.seeds.shape[0]

    def of(self, block: slice) -> "Draw":
        """That of some requests, which often are all of them."""
        if self.noise is None or block.stop - block.start == self.requests:
            return self
        which = None if self.which is None else self.which[block]
        sampling = self.sampling.narrow(block.start, block.stop)
        return Draw(self.each, sampling, self.noise.narrow(block), which)

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


def words_of(draws: Sequence[Draw]) -> Tensor:
    """How each of their T rows draws, as int64 `[T, WORDS]`; floats as the bits of float64."""
    parts = []
    for draw in draws:
        s = draw.sampling
        floats = [draw.by_row(one).double() for one in (s.inverse_temperature, s.noise_scale, s.top_p, s.min_p)]
        bits = [one.view(torch.int64) for one in floats]
        parts.append(torch.stack([*bits, draw.by_row(s.top_k), draw.keys()], 1))
    return torch.cat(parts)


def checksum(draws: Sequence[Draw]) -> Tensor:
    """One number, `[1]`, that tells whether rows are drawn elsewhere as they are here."""
    words = words_of(draws).view(-1)
    weights = torch.arange(words.shape[0], device=words.device).mul_(2).add_(1)
    return words.mul_(weights).sum(0, keepdim=True)


def draw_of(words: Tensor, like: Draw) -> Draw:
    """The rows that `words_of` describes, each as a request of its own; dtypes, tokens and filtering are as of `like`.

    Seeds are left out: they are in the keys.
    """
    assert like.noise is not None, "nobody samples"
    sampling, noise = like.sampling, like.noise
    floats = words.view(torch.float64)[:, :4].to(sampling.inverse_temperature.dtype)
    inverse, scale, top_p, min_p = floats.unbind(1)
    top_k, keys = words[:, 4], words[:, 5]
    one = SamplingBatch(inverse, scale, top_k, top_p, min_p, torch.zeros_like(keys), sampling.noisy, sampling.filtered)
    return Draw(1, one, Noise(keys[:, None], noise.hashes, noise.dtype))
