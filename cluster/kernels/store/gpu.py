"""Stores of new cells into a KV pool: as numbers, or as FP8 codes with scales (arch/cell.py)."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class StoreArguments(NamedTuple):
    """What `store` takes, in its order; its constants follow by name."""

    kv: Tensor
    write: Tensor
    memory: Tensor
    bad: Tensor
    kv_stride: int


@triton.jit
def store(kv, write, memory, bad, kv_stride, CELL: tl.constexpr, BLOCK: tl.constexpr):
    """Store new cells `kv` `[T, CELL]` to slots `write` `[T]` of `memory`. A cell that is not finite is stored as
    zeros, and its row is marked in `bad` `[T]`.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    held = at < CELL
    cell = tl.load(kv + row * kv_stride + at, mask=held, other=0.0)
    spoiled = tl.max((held & (cell - cell != 0)).to(tl.int32), 0)  # x - x is NaN for NaN and infinity
    cell = tl.where(spoiled != 0, 0.0, cell)
    tl.store(memory + tl.load(write + row).to(tl.int64) * CELL + at, cell, mask=held)
    tl.store(bad + row, spoiled)


@triton.jit
def power(byte):
    """Return 2 ** (byte - 127): the byte becomes the exponent field of a float32."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def code_of(x):
    """Return the byte of the nearest e4m3, ties to even, of float32 numbers from -448 to 448."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal numbers: round the mantissa from 23 to 3 bits, ties to even, and change the exponent bias from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6, the smallest normal e4m3, codes are 2^-9 apart, as floats from 2^14 to 2^15 are: adding 2^14 rounds
    # the number to a multiple of 2^-9, and leaves the code in the low bits.
    tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) & 0xFF
    return (tl.where(size < 0x3C800000, tiny, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_group(kv, cell, scale_at, first, spoiled, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Store numbers `first` to `first` + `SIZE` - 1 of `kv` to their `cell` as codes with one scale (arch/cell.py)."""
    at = tl.arange(0, BLOCK)
    held = at < SIZE
    own = tl.load(kv + first + at, mask=held, other=0.0).to(WIDE)
    own = tl.where(spoiled != 0, 0.0, own)
    most = tl.max(tl.abs(own), 0)
    # exponent - 127 is the least k with most <= 1.75 * 2^k: adding a quarter of the mantissa's range, less one, carries
    # into the exponent if the mantissa is above 1.75. 1.75 * 2^k = 448 * 2^(k - 8), so the scale is 2^(k - 8).
    if tl.float64 == WIDE:
        exponent = ((most.to(tl.int64, bitcast=True) + ((1 << 50) - 1)) >> 52).to(tl.int32) - 1023 + 127
    else:
        exponent = (most.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23
    scale = tl.where(spoiled != 0, 0, tl.maximum(exponent - 8, 10))
    fitted = (own * power(tl.where(spoiled != 0, 127, 254 - scale)).to(WIDE)).to(tl.float32)
    tl.store(cell + first + at, code_of(fitted), mask=held)
    tl.store(cell + scale_at, scale.to(tl.uint8))


class StoreCodedArguments(NamedTuple):
    """What `store_coded` takes, in its order; its constants follow by name."""

    kv: Tensor
    write: Tensor
    memory: Tensor
    bad: Tensor
    kv_stride: int
    most: float


@triton.jit
def store_coded(
    kv,
    write,
    memory,
    bad,
    kv_stride,
    most,
    NUMBERS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    REST: tl.constexpr,
    BYTES: tl.constexpr,
    WIDE: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As `store`, in FP8: a cell of `BYTES` bytes has `GROUPS` groups of `SIZE` numbers and, if `REST` is not 0, one
    group of `REST` numbers. A cell with a magnitude above `most` counts as not finite.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, ALL)
    kv += row * kv_stride
    cell = memory + tl.load(write + row).to(tl.int64) * BYTES
    whole = tl.load(kv + at, mask=at < NUMBERS, other=0.0).to(WIDE)
    spoiled = tl.max((~(tl.abs(whole) <= most)).to(tl.int32), 0)  # the negated comparison is True for NaN too
    for group in range(GROUPS):
        store_group(kv, cell, NUMBERS + group, group * SIZE, spoiled, SIZE, WIDE, BLOCK)
    if REST:
        store_group(kv, cell, NUMBERS + GROUPS, GROUPS * SIZE, spoiled, REST, WIDE, BLOCK)
    tl.store(bad + row, spoiled)
