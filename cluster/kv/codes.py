"""Cells in FP8 (`arch/cell.py`) in plain torch: the twin of what attention's kernels store and read.

Shape legend: n cells, B bytes of one.
"""

from math import frexp

import torch
from torch import Tensor

from cluster.arch.cell import CodedCell

BIAS = 127  # of a scale's byte, as in float32
LEAST, MOST = BIAS - 117, BIAS + 119  # with these neither a scale, nor its inverse, nor the smallest number is denormal


def largest(dtype: torch.dtype) -> float:
    """The largest number of `dtype` that a cell may hold; read back, one above it might be infinite."""
    return 1.75 * 2.0 ** min(MOST - BIAS + 8, frexp(torch.finfo(dtype).max)[1] - 1)


def coded(kv: Tensor, cell: CodedCell) -> Tensor:
    """Cells `[n, *shape]`, of no number above `largest` -> `[n, B]` uint8."""
    flat, at, wide = kv.flatten(1), 0, torch.promote_types(kv.dtype, torch.float32)
    codes, scales = [], []
    for count, size in cell.groups:
        own = flat[:, at : at + count * size].reshape(-1, count, size).to(wide)
        most = own.abs().amax(-1)
        fraction, exponent = torch.frexp(most)
        scale = (exponent - 9 + (fraction > 0.875).int() + BIAS).masked_fill_(most == 0, LEAST).clamp_(LEAST, MOST)
        fitted = own * power(2 * BIAS - scale).to(wide)[..., None]
        codes.append(fitted.float().to(torch.float8_e4m3fn).view(torch.uint8).flatten(1))
        scales.append(scale.to(torch.uint8))
        at += count * size
    taken = at + sum(count for count, _ in cell.groups)
    return torch.cat([*codes, *scales, flat.new_zeros(flat.shape[0], cell.nbytes - taken, dtype=torch.uint8)], 1)


def decoded(stored: Tensor, cell: CodedCell, dtype: torch.dtype) -> Tensor:
    """`[n, B]` uint8 -> cells `[n, *shape]` of `dtype`, exactly."""
    parts, at, first = [], 0, cell.numbers
    for count, size in cell.groups:
        codes = stored[:, at : at + count * size].view(torch.float8_e4m3fn).reshape(-1, count, size)
        scale = power(stored[:, first : first + count].int())
        parts.append((codes.float() * scale[..., None]).to(dtype).flatten(1))
        at, first = at + count * size, first + count
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).view(-1, *cell.shape)


def power(byte: Tensor) -> Tensor:
    """2 ** (byte - 127) in float32, of int32."""
    return (byte << 23).view(torch.float32)
