"""FP8 cells (`arch/cell.py`) in plain torch: the reference implementation of what attention kernels store and read.

Shape legend: n cells, B bytes of one cell.
"""

from math import frexp

import torch
from torch import Tensor

from cluster.arch.cell import CodedCell

BIAS = 127  # exponent bias of a scale's byte, as in float32: the byte b means 2 ** (b - 127)
LEAST, MOST = BIAS - 117, BIAS + 119  # so scale, 1 / scale and scale * 2^-9 (the smallest number) are normal floats


def largest(dtype: torch.dtype) -> float:
    """Return the largest magnitude that an FP8 cell of `dtype` may hold; a larger one could decode to infinity.

    The magnitude is 448 * 2^e = 1.75 * 2^(e + 8) for the largest scale exponent e, but at most 1.75 * 2^k, where 2^k is
    the largest power of two in `dtype`.
    """
    return 1.75 * 2.0 ** min(MOST - BIAS + 8, frexp(torch.finfo(dtype).max)[1] - 1)


def coded(kv: Tensor, cell: CodedCell) -> Tensor:
    """Encode cells `[n, *shape]`, with no magnitude above `largest`, as FP8: `[n, B]` uint8."""
    flat, at, wide = kv.flatten(1), 0, torch.promote_types(kv.dtype, torch.float32)
    codes, scales = [], []
    for count, size in cell.groups:
        own = flat[:, at : at + count * size].reshape(-1, count, size).to(wide)
        most = own.abs().amax(-1)
        # The least e with most <= 448 * 2^e. 448 = 0.875 * 2^9, and most = fraction * 2^exponent, fraction in [0.5, 1):
        # e = exponent - 9, plus 1 if fraction > 0.875.
        fraction, exponent = torch.frexp(most)
        scale = (exponent - 9 + (fraction > 0.875).int() + BIAS).masked_fill_(most == 0, LEAST).clamp_(LEAST, MOST)
        fitted = own * power(2 * BIAS - scale).to(wide)[..., None]
        codes.append(fitted.float().to(torch.float8_e4m3fn).view(torch.uint8).flatten(1))
        scales.append(scale.to(torch.uint8))
        at += count * size
    taken = at + sum(count for count, _ in cell.groups)
    return torch.cat([*codes, *scales, flat.new_zeros(flat.shape[0], cell.nbytes - taken, dtype=torch.uint8)], 1)


def decoded(stored: Tensor, cell: CodedCell, dtype: torch.dtype) -> Tensor:
    """Decode `[n, B]` uint8 to cells `[n, *shape]` of `dtype`, without rounding."""
    parts, at, first = [], 0, cell.numbers
    for count, size in cell.groups:
        codes = stored[:, at : at + count * size].view(torch.float8_e4m3fn).reshape(-1, count, size)
        scale = power(stored[:, first : first + count].int())
        parts.append((codes.float() * scale[..., None]).to(dtype).flatten(1))
        at, first = at + count * size, first + count
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).view(-1, *cell.shape)


def power(byte: Tensor) -> Tensor:
    """Return 2 ** (byte - 127) as float32 for int32 bytes: the byte becomes the exponent field."""
    return (byte << 23).view(torch.float32)
