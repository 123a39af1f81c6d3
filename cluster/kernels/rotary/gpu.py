"""Norm and rotary embedding of heads, in place. One program handles one head of one row.

Each number is read and written by the same thread, so writing in place needs no barrier.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class RotateArguments(NamedTuple):
    """The arguments of the kernel `rotate`, in order, without its constants, which `launch` passes by name."""

    heads: Tensor
    cosines: Tensor
    sines: Tensor
    q_scale: Tensor | None
    k_scale: Tensor | None
    row_stride: int
    head_stride: int
    query_heads: int
    head_dim: int
    half_rotary_dim: int
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
    query_heads,
    head_dim,
    half_rotary_dim,
    eps,
    HAS_NORMS: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Rotate the first 2 x `half_rotary_dim` numbers of each head `[T, n, head_dim]` by `cosines` and signed `sines`
    `[T, 2 half_rotary_dim]`: (low cos + high sin, high cos + low sin).

    If `HAS_NORMS`, heads are RMS-normed first: the first `query_heads` heads with `q_scale`, the others with `k_scale`.
    `REST_BLOCK` is the block size for the numbers that are not rotated. It is 0 if there are none, or if they do not
    change because there are no norms.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head_start = heads + row * row_stride + head * head_stride
    offsets = tl.arange(0, HALF_BLOCK)
    mask = offsets < half_rotary_dim
    low = tl.load(head_start + offsets, mask=mask, other=0.0).to(ACC_DTYPE)
    high = tl.load(head_start + half_rotary_dim + offsets, mask=mask, other=0.0).to(ACC_DTYPE)
    if HAS_NORMS:
        total = tl.sum(low * low) + tl.sum(high * high)
        scale = q_scale if head < query_heads else k_scale
        if REST_BLOCK:
            rest_offsets = 2 * half_rotary_dim + tl.arange(0, REST_BLOCK)
            rest = tl.load(head_start + rest_offsets, mask=rest_offsets < head_dim, other=0.0).to(ACC_DTYPE)
            total += tl.sum(rest * rest)
        factor = 1 / tl.sqrt(total / head_dim + eps)
        low *= factor * tl.load(scale + offsets, mask=mask, other=0.0).to(ACC_DTYPE)
        high *= factor * tl.load(scale + half_rotary_dim + offsets, mask=mask, other=0.0).to(ACC_DTYPE)
        if REST_BLOCK:
            rest *= factor * tl.load(scale + rest_offsets, mask=rest_offsets < head_dim, other=0.0).to(ACC_DTYPE)
            tl.store(head_start + rest_offsets, rest.to(heads.dtype.element_ty), mask=rest_offsets < head_dim)
    angle_offsets = row * 2 * half_rotary_dim + offsets
    rotated_low = low * tl.load(cosines + angle_offsets, mask=mask, other=0.0).to(ACC_DTYPE)
    rotated_low += high * tl.load(sines + angle_offsets, mask=mask, other=0.0).to(ACC_DTYPE)
    rotated_high = high * tl.load(cosines + half_rotary_dim + angle_offsets, mask=mask, other=0.0).to(ACC_DTYPE)
    rotated_high += low * tl.load(sines + half_rotary_dim + angle_offsets, mask=mask, other=0.0).to(ACC_DTYPE)
    tl.store(head_start + offsets, rotated_low.to(heads.dtype.element_ty), mask=mask)
    tl.store(head_start + half_rotary_dim + offsets, rotated_high.to(heads.dtype.element_ty), mask=mask)
