"""Rotary embeddings as tables of cos and sin, and the permutation of neighbouring pairs to the half-split layout."""

import math

import torch
from torch import Tensor

from cluster.arch import Rope
from cluster.kernels.interface import Angles
from cluster.models.arithmetic import joined


def frequencies(rope: Rope, dim: int) -> Tensor:
    """Radians per position of the `dim / 2` pairs, float64, scaled as `rope` says.

    llama3 as in the Llama 3.1 release: long wavelengths are divided by `factor`, the band between the two frequency
    factors is blended. YaRN (arXiv 2309.00071): the band lies between the dimensions that turn `beta_fast` and
    `beta_slow` times over the original length.
    """
    inverse = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if rope.llama3 is not None:
        factor, low, high, length = rope.llama3
        wavelength = 2 * math.pi / inverse
        blend = ((length / wavelength - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * inverse / factor + blend * inverse
    if rope.yarn is not None:
        yarn = rope.yarn
        first, last = (
            dim * math.log(yarn.length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
            for turns in (yarn.beta_fast, yarn.beta_slow)
        )
        if yarn.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        last += 0.001 * (first == last)
        ramp = ((torch.arange(dim // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
        return ramp * inverse / yarn.factor + (1 - ramp) * inverse
    return inverse / rope.linear


class RotaryTable:
    """cos and signed sin per position, `[P, 1, d]`; see `Angles`."""

    def __init__(self, rope: Rope, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        inverse = frequencies(rope, head_dim)
        if dtype != torch.float64:
            inverse = inverse.float()
        angle = torch.arange(positions, dtype=inverse.dtype)[:, None] * inverse
        grown = 1.0 if rope.yarn is None else rope.yarn.attention
        cos, sin = angle.cos() * grown, angle.sin() * grown
        self._cos = torch.cat([cos, cos], -1)[:, None].to(device, dtype)
        self._sin = torch.cat([-sin, sin], -1)[:, None].to(device, dtype)

    def at(self, positions: Tensor) -> Angles:
        """The angles of rows at `positions` `[T]`."""
        return Angles(self._cos.index_select(0, positions), self._sin.index_select(0, positions))


def half_split(weight: Tensor, heads: int, rotated: int | None = None) -> Tensor:
    """Rows `[n * d, ..]` made for rope over neighbouring pairs -> the same heads for the half-split layout.

    Of each head the last `rotated` rows are permuted, all if that is None. Attention scores do not change, because q
    and k are permuted alike.
    """
    split = weight.view(heads, -1, *weight.shape[1:])
    keep = 0 if rotated is None else split.shape[1] - rotated
    turned = split[:, keep:]
    return joined([split[:, :keep], turned[:, 0::2], turned[:, 1::2]], 1).reshape(weight.shape)
