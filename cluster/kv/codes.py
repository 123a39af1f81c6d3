"""Encodes and decodes FP8 cells (`arch/cell.py`) in plain torch: the reference for what attention kernels store and
read. A cell is what one token stores in one layer: K and V, or one latent.

Shape legend: n cells, B bytes of one cell.
"""

from math import frexp

import torch
from torch import Tensor

from cluster.arch.cell import Cell

BIAS = 127  # exponent bias of a scale's byte, as in float32: the byte b means 2 ** (b - 127)
MIN_SCALE_BYTE, MAX_SCALE_BYTE = (
    BIAS - 117,
    BIAS + 119,
)  # so scale, 1 / scale and scale * 2^-9 (the smallest number) are normal floats


def max_magnitude(dtype: torch.dtype) -> float:
    """Return the largest magnitude that an FP8 cell of `dtype` may hold; a larger one could decode to infinity.

    The magnitude is 448 * 2^e = 1.75 * 2^(e + 8) for the largest scale exponent e, but at most 1.75 * 2^k, where 2^k is
    the largest power of two in `dtype`.
    """
    return 1.75 * 2.0 ** min(MAX_SCALE_BYTE - BIAS + 8, frexp(torch.finfo(dtype).max)[1] - 1)


def encode(kv: Tensor, cell: Cell) -> Tensor:
    """Encode cells `[n, *shape]`, with no magnitude above `max_magnitude`, as FP8: `[n, B]` uint8."""
    flat, offset, compute_dtype = kv.flatten(1), 0, torch.promote_types(kv.dtype, torch.float32)
    codes, scales = [], []
    for count, size in cell.groups:
        group = flat[:, offset : offset + count * size].reshape(-1, count, size).to(compute_dtype)
        largest_magnitude = group.abs().amax(-1)
        # The least e with magnitude <= 448 * 2^e. 448 = 0.875 * 2^9, and magnitude = fraction * 2^exponent with
        # fraction in [0.5, 1): e = exponent - 9, plus 1 if fraction > 0.875.
        fraction, exponent = torch.frexp(largest_magnitude)
        scale = (
            (exponent - 9 + (fraction > 0.875).int() + BIAS)
            .masked_fill_(largest_magnitude == 0, MIN_SCALE_BYTE)
            .clamp_(MIN_SCALE_BYTE, MAX_SCALE_BYTE)
        )
        scaled = group * power(2 * BIAS - scale).to(compute_dtype)[..., None]
        codes.append(scaled.float().to(torch.float8_e4m3fn).view(torch.uint8).flatten(1))
        scales.append(scale.to(torch.uint8))
        offset += count * size
    padding_bytes = cell.fp8_bytes - offset - sum(count for count, _ in cell.groups)
    return torch.cat([*codes, *scales, flat.new_zeros(flat.shape[0], padding_bytes, dtype=torch.uint8)], 1)


def decode(encoded: Tensor, cell: Cell, dtype: torch.dtype) -> Tensor:
    """Decode `[n, B]` uint8 to cells `[n, *shape]` of `dtype`, without rounding."""
    parts, offset, scale_offset = [], 0, cell.numbers
    for count, size in cell.groups:
        codes = encoded[:, offset : offset + count * size].view(torch.float8_e4m3fn).reshape(-1, count, size)
        scale = power(encoded[:, scale_offset : scale_offset + count].int())
        parts.append((codes.float() * scale[..., None]).to(dtype).flatten(1))
        offset, scale_offset = offset + count * size, scale_offset + count
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).view(-1, *cell.shape)


def power(byte: Tensor) -> Tensor:
    """Return 2 ** (byte - 127) as float32 for int32 bytes: the byte becomes the exponent field."""
    return (byte << 23).view(torch.float32)
