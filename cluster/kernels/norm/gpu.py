"""RMS norm with an optional residual sum before it. One program computes one row."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class AddNormArguments(NamedTuple):
    """What `add_norm` takes, in its order; its constants follow by name."""

    rows: Tensor
    more: Tensor | None
    scale: Tensor
    total: Tensor
    out: Tensor
    stride: int
    size: int
    eps: float


@triton.jit
def add_norm(
    rows, more, scale, total, out, stride, size, eps, MORE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the RMS norm of x times `scale` `[size]` to `out`: out = x / sqrt(mean(x^2) + eps) * scale. If `MORE`, x is
    `rows` + `more` `[T, size]`, which is also written to `total`; if not, x is `rows`. `rows` are at `stride`; the
    other tensors are contiguous.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    held = at < size
    given = tl.load(rows + row * stride + at, mask=held, other=0.0)
    x = given.to(WIDE)
    if MORE:
        given = (x + tl.load(more + row * size + at, mask=held, other=0.0).to(WIDE)).to(given.dtype)
        tl.store(total + row * size + at, given, mask=held)
        x = given.to(WIDE)  # the norm is of the sum as rounded to its dtype, like torch's
    x *= 1 / tl.sqrt(tl.sum(x * x) / size + eps)
    x *= tl.load(scale + at, mask=held, other=0.0).to(WIDE)
    tl.store(out + row * size + at, x.to(given.dtype), mask=held)
