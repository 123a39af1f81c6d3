"""A reference of an FP8 cache: the values of its cells from the definition, in float64, without the product's code."""

import torch
from torch import Tensor

from cluster.arch.cell import Cell

LARGEST = 448.0
# The values of float8_e4m3fn by code. The exponent bias is 7; code 127 is NaN and left out.
MAGNITUDES = torch.tensor(
    [(code & 7) / 8 * 2.0**-6 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7) for code in range(127)],
    dtype=torch.float64,
)


def nearest(x: Tensor) -> Tensor:
    """Round numbers from -448 to 448 to the nearest e4m3 values. The even code wins between two equally near values."""
    above = torch.bucketize(x.abs(), MAGNITUDES).clamp(max=126)
    below = (above - 1).clamp(min=0)
    up, down = MAGNITUDES[above] - x.abs(), x.abs() - MAGNITUDES[below]
    return torch.where((up < down) | ((up == down) & (above % 2 == 0)), MAGNITUDES[above], MAGNITUDES[below]) * x.sign()


def scale_of(group: Tensor) -> Tensor:
    """Return the scale of each group `[.., d]`: the smallest power of two from 2^-117 to 2^119 such that no number of
    the group is more than 448 times the scale.
    """
    powers = 2.0 ** torch.arange(-117, 120, dtype=torch.float64)
    return powers[torch.bucketize(group.double().abs().amax(-1), LARGEST * powers)]


def groups(kv: Tensor, cell: Cell) -> list[Tensor]:
    """Split cells `[n, *cell.shape]` into the parts `[n, d]` that have scales of their own, in order."""
    sizes = [cell.key_dim] * cell.kv_heads + [cell.value_dim] * cell.kv_heads
    if cell.is_latent:
        sizes = [size for size in (cell.value_dim, cell.key_dim - cell.value_dim) if size]
    return list(kv.double().flatten(1).split(sizes, 1))


def cached_values(kv: Tensor, cell: Cell) -> Tensor:
    """Return the values that the cache has after writing cells `[n, *cell.shape]`."""
    parts = [nearest(part / scale_of(part)[:, None]) * scale_of(part)[:, None] for part in groups(kv, cell)]
    return torch.cat(parts, 1).view(kv.shape)


def error_bound(kv: Tensor, cell: Cell) -> Tensor:
    """Return the largest rounding error of each number.

    A normal number has 3 bits after the leading one, so its error is at most 1/16 of the number. Below the smallest
    normal number, 2^-6, the distance between codes is 2^-9, so the error is at most 2^-10 times the scale.
    """
    parts = [torch.maximum(part.abs() / 16, scale_of(part)[:, None] * 2.0**-10) for part in groups(kv, cell)]
    return torch.cat(parts, 1).view(kv.shape)
