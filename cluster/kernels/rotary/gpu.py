"""Norm and rotary embedding of heads, in place. One program handles one head of one row.

Each number is read and written by the same thread, so writing in place needs no barrier.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class RotateArguments(NamedTuple):
    """What `rotate` takes, in its order; its constants follow by name."""

    heads: Tensor
    cosines: Tensor
    sines: Tensor
    q_scale: Tensor | None
    k_scale: Tensor | None
    row_stride: int
    head_stride: int
    queries: int
    size: int
    half: int
    eps: float


@triton.jit
def rotate(
    heads,
    cosines,
    sines,
    q_scale,
    k_scale,
    row_stride,
    head_stride,
    queries,
    size,
    half,
    eps,
    NORMED: tl.constexpr,
    WIDE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate the first 2 x `half` numbers of each head `[T, n, size]` by `cosines` and signed `sines` `[T, 2 half]`:
    (low cos + high sin, high cos + low sin).

    If `NORMED`, heads are RMS-normed first: the first `queries` heads with `q_scale`, the others with `k_scale`. `REST`
    is the block size for the numbers that are not rotated (0 if there are none, or if they do not change).
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = heads + row * row_stride + head * head_stride
    at = tl.arange(0, HALF)
    held = at < half
    low = tl.load(base + at, mask=held, other=0.0).to(WIDE)
    high = tl.load(base + half + at, mask=held, other=0.0).to(WIDE)
    if NORMED:
        total = tl.sum(low * low) + tl.sum(high * high)
        scale = q_scale if head < queries else k_scale
        if REST:
            behind = 2 * half + tl.arange(0, REST)
            rest = tl.load(base + behind, mask=behind < size, other=0.0).to(WIDE)
            total += tl.sum(rest * rest)
        factor = 1 / tl.sqrt(total / size + eps)
        low *= factor * tl.load(scale + at, mask=held, other=0.0).to(WIDE)
        high *= factor * tl.load(scale + half + at, mask=held, other=0.0).to(WIDE)
        if REST:
            rest *= factor * tl.load(scale + behind, mask=behind < size, other=0.0).to(WIDE)
            tl.store(base + behind, rest.to(heads.dtype.element_ty), mask=behind < size)
    angle = row * 2 * half + at
    turned_low = low * tl.load(cosines + angle, mask=held, other=0.0).to(WIDE)
    turned_low += high * tl.load(sines + angle, mask=held, other=0.0).to(WIDE)
    turned_high = high * tl.load(cosines + half + angle, mask=held, other=0.0).to(WIDE)
    turned_high += low * tl.load(sines + half + angle, mask=held, other=0.0).to(WIDE)
    tl.store(base + at, turned_low.to(heads.dtype.element_ty), mask=held)
    tl.store(base + half + at, turned_high.to(heads.dtype.element_ty), mask=held)
