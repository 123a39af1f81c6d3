"""FP8 cells from the definition, in float64 and without the product's code: what a cache of them holds."""

import torch
from torch import Tensor

LARGEST = 448.0
# Numbers of float8_e4m3fn by code: 7 is the bias, code 127 is not a number.
MAGNITUDES = torch.tensor(
    [(code & 7) / 8 * 2.0**-6 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7) for code in range(127)],
    dtype=torch.float64,
)


def nearest(x: Tensor) -> Tensor:
    """The nearest e4m3 of numbers from -448 to 448; of two that are as near the one of even code."""
    above = torch.bucketize(x.abs(), MAGNITUDES).clamp(max=126)
    below = (above - 1).clamp(min=0)
    up, down = MAGNITUDES[above] - x.abs(), x.abs() - MAGNITUDES[below]
    return torch.where((up < down) | ((up == down) & (above % 2 == 0)), MAGNITUDES[above], MAGNITUDES[below]) * x.sign()


def scale_of(group: Tensor) -> Tensor:
    """The smallest power of two, from 2^-117 to 2^119, of which none of the numbers `[.., d]` is more than 448."""
    powers = 2.0 ** torch.arange(-117, 120, dtype=torch.float64)
    return powers[torch.bucketize(group.double().abs().amax(-1), LARGEST * powers)]


def groups(kv: Tensor, latent: int | None) -> list[Tensor]:
    """What shares scales, the last dimension each."""
    if latent in (None, kv.shape[-1]):
        return [kv.double()]
    return [kv.double()[..., :latent], kv.double()[..., latent:]]


def held(kv: Tensor, latent: int | None = None) -> Tensor:
    """What a cache holds of cells `[n, parts, nkv, d]`; of latent ones the first `latent` numbers are the latent."""
    parts = groups(kv, latent)
    return torch.cat([nearest(part / scale_of(part)[..., None]) * scale_of(part)[..., None] for part in parts], -1)


def bound(kv: Tensor, latent: int | None = None) -> Tensor:
    """How far each number may be off: with 3 bits behind the first a number is at most 1/16 of itself off; below the
    smallest normal number, 2^-6, codes are 2^-9 apart, half of which is 2^-10.
    """
    parts = groups(kv, latent)
    return torch.cat([torch.maximum(part.abs() / 16, scale_of(part)[..., None] * 2.0**-10) for part in parts], -1)
