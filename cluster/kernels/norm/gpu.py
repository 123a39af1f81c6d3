"""RMS norm with an optional residual sum before it. One program computes one row."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class AddNormArguments(NamedTuple):
    """The arguments of the kernel `add_norm`, in order, without its constants, which `launch` passes by name."""

    rows: Tensor
    residual: Tensor | None
    scale: Tensor
    total: Tensor | None
    out: Tensor
    stride: int
    size: int
    eps: float


@triton.jit
def add_norm(
    rows,
    residual,
    scale,
    total,
    out,
    stride,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the RMS norm of x times `scale` `[size]` to `out`: out = x / sqrt(mean(x^2) + eps) * scale. If
    `HAS_RESIDUAL`, x is `rows` + `residual` `[T, size]`, which is also written to `total`; if not, x is `rows`. Rows of
    `rows` begin `stride` numbers apart; the other tensors are contiguous.
    """
    row, offsets = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = offsets < size
    stored = tl.load(rows + row * stride + offsets, mask=mask, other=0.0)
    x = stored.to(ACC_DTYPE)
    if HAS_RESIDUAL:
        stored = (x + tl.load(residual + row * size + offsets, mask=mask, other=0.0).to(ACC_DTYPE)).to(stored.dtype)
        tl.store(total + row * size + offsets, stored, mask=mask)
        x = stored.to(ACC_DTYPE)  # the norm is of the sum as rounded to its dtype, like torch's
    x *= 1 / tl.sqrt(tl.sum(x * x) / size + eps)
    x *= tl.load(scale + offsets, mask=mask, other=0.0).to(ACC_DTYPE)
    tl.store(out + row * size + offsets, x.to(stored.dtype), mask=mask)
