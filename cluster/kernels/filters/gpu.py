"""Filters top_k, top_p and min_p as one threshold per row, found by radix select, without a sort.

Probability mass is summed in integers, so the order of a sum does not matter. The exponentials come from the function
that torch calls on a GPU.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from cluster.kernels.choice.gpu import in_order, number_of, signed, unsigned


@triton.jit
def tempered(logits, scale, at, held, WIDE: tl.constexpr):
    """Load logits and multiply them by the inverse temperature."""
    return tl.load(logits + at, mask=held, other=0.0).to(WIDE) * scale


@triton.jit
def mass_of(x, top, kth, MASS: tl.constexpr, LIBRARY: tl.constexpr):
    """Return the integer mass floor(MASS * exp(x - top)) of tempered logits x; 0 below `kth`, the top_k threshold."""
    if LIBRARY:
        share = libdevice.exp(x - top)
    else:
        share = tl.exp(x - top)
    return tl.where(x < kth, 0, (share * MASS).to(tl.int64))


@triton.jit
def least_with(
    logits,
    scale,
    columns,
    needed,
    top,
    kth,
    WEIGHED: tl.constexpr,
    MASS: tl.constexpr,
    LIBRARY: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the largest number t such that the tempered logits >= t together weigh at least `needed`.

    Each logit weighs 1, or its mass if `WEIGHED`; all logits together must weigh at least `needed`. Radix select: each
    pass over the row fixes the next two bits of t, the highest first, in the integers of `unsigned(in_order(x))`.
    """
    UNSIGNED: tl.constexpr = tl.uint64 if tl.float64 == WIDE else tl.uint32
    BITS: tl.constexpr = UNSIGNED.primitive_bitwidth
    digits = tl.arange(0, 4).to(UNSIGNED) << (BITS - 2)
    found = tl.full([], 0, UNSIGNED)
    for _ in range(BITS // 2):
        tried = found | digits
        weight = tl.zeros([4, BLOCK], tl.int64)
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            held = at < columns
            x = tempered(logits, scale, at, held, WIDE)
            order = unsigned(in_order(x))
            if WEIGHED:
                own = tl.where(held, mass_of(x, top, kth, MASS, LIBRARY), 0)
            else:
                own = held.to(tl.int64)
            weight += tl.where(order[None, :] >= tried[:, None], own[None, :], 0)
        enough = tl.sum(weight, 1) >= needed  # monotonic: a higher digit has less weight above it
        found = found | tl.max(tl.where(enough, digits, 0), 0)
        digits = digits >> 2
    return number_of(signed(found), WIDE)


class ThresholdArguments(NamedTuple):
    """What `threshold` takes, in its order; its constants follow by name."""

    logits: Tensor
    inverse: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    least: Tensor
    stride: int
    columns: int


@triton.jit
def threshold(
    logits,
    inverse,
    top_k,
    top_p,
    log_min_p,
    least,
    stride,
    columns,
    MASS: tl.constexpr,
    LIBRARY: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the threshold `least` `[T]` of each row of `logits` `[T, columns]`: the least tempered logit that top_k,
    top_p and min_p all keep; -inf without filters. For a row with NaN or an infinite maximum, it is NaN, which removes
    no token.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    scale = tl.load(inverse + row).to(WIDE)
    most, odd = tl.full([BLOCK], float("-inf"), WIDE), tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tempered(logits, scale, at, at < columns, WIDE)
        x = tl.where(at < columns, x, float("-inf"))
        odd += (x != x).to(tl.int32)
        most = tl.where(x > most, x, most)
    top = tl.max(most, 0)
    finite = (tl.sum(odd, 0) == 0) & (top - top == 0)
    kept = tl.full([], float("-inf"), WIDE)
    if finite:
        rank, share = tl.load(top_k + row), tl.load(top_p + row)
        if (rank > 0) & (rank < columns):
            kept = least_with(logits, scale, columns, rank, top, top, False, MASS, LIBRARY, WIDE, BLOCK)
        kth = kept
        if share < 1:
            weight = tl.zeros([BLOCK], tl.int64)
            for start in range(0, columns, BLOCK):
                at = start + tl.arange(0, BLOCK)
                held = at < columns
                x = tempered(logits, scale, at, held, WIDE)
                weight += tl.where(held, mass_of(x, top, kth, MASS, LIBRARY), 0)
            needed = tl.ceil(tl.sum(weight, 0).to(tl.float64) * share.to(tl.float64)).to(tl.int64)
            needed = tl.maximum(needed, 1)
            nucleus = least_with(logits, scale, columns, needed, top, kth, True, MASS, LIBRARY, WIDE, BLOCK)
            kept = tl.maximum(kept, nucleus)
        # min_p: x >= top + log(min_p). The top token always stays.
        kept = tl.minimum(tl.maximum(kept, top + tl.load(log_min_p + row).to(WIDE)), top)
    tl.store(least + row, tl.where(finite, kept, float("nan")))
