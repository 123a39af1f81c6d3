"""Stores of new cells into a KV pool: as numbers, or as FP8 codes with scales (`arch/cell.py` has the layout)."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class StoreArguments(NamedTuple):
    """The arguments of the kernel `store`, in order, without its constants, which `launch` passes by name."""

    kv: Tensor
    write_slots: Tensor
    memory: Tensor
    nonfinite_rows: Tensor
    kv_stride: int


@triton.jit
def store(kv, write_slots, memory, nonfinite_rows, kv_stride, CELL_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store new cells `kv` `[T, CELL_SIZE]` to slots `write_slots` `[T]` of `memory`. A cell with a number that is not
    finite is stored as zeros. `nonfinite_rows` `[T]` becomes 1 for rows with such a cell, and 0 for others.
    """
    row, offsets = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = offsets < CELL_SIZE
    cell = tl.load(kv + row * kv_stride + offsets, mask=mask, other=0.0)
    is_nonfinite = tl.max((mask & (cell - cell != 0)).to(tl.int32), 0)  # x - x is NaN for NaN and infinity
    cell = tl.where(is_nonfinite != 0, 0.0, cell)
    tl.store(memory + tl.load(write_slots + row).to(tl.int64) * CELL_SIZE + offsets, cell, mask=mask)
    tl.store(nonfinite_rows + row, is_nonfinite)


@triton.jit
def power_of_two(byte):
    """Return 2 ** (byte - 127): the byte becomes the exponent field of a float32."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_code(x):
    """Return the byte of the nearest e4m3, ties to even, of float32 numbers from -448 to 448."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers: round the mantissa from 23 to 3 bits, ties to even, and change the exponent bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6, the smallest normal e4m3, codes are 2^-9 apart, as floats from 2^14 to 2^15 are: adding 2^14 rounds
    # the number to a multiple of 2^-9, and leaves the code in the low bits.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) & 0xFF
    return (tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_group(
    kv,
    cell,
    scale_at,
    group_start,
    is_nonfinite,
    GROUP_SIZE: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store numbers `group_start` to `group_start` + `GROUP_SIZE` - 1 of the new cell `kv` as FP8 codes at the same
    offsets of the stored `cell`, and their common scale at offset `scale_at`. If `is_nonfinite`, store zeros.
    """
    offsets = tl.arange(0, BLOCK)
    mask = offsets < GROUP_SIZE
    values = tl.load(kv + group_start + offsets, mask=mask, other=0.0).to(ACC_DTYPE)
    values = tl.where(is_nonfinite != 0, 0.0, values)
    max_abs = tl.max(tl.abs(values), 0)
    # exponent - 127 is the least k with max_abs <= 1.75 * 2^k: adding a quarter of the mantissa's range, less one,
    # carries into the exponent if the mantissa is above 1.75. 1.75 * 2^k = 448 * 2^(k - 8), so the scale is 2^(k - 8).
    if tl.float64 == ACC_DTYPE:
        exponent = ((max_abs.to(tl.int64, bitcast=True) + ((1 << 50) - 1)) >> 52).to(tl.int32) - 1023 + 127
    else:
        exponent = (max_abs.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23
    scale = tl.where(is_nonfinite != 0, 0, tl.maximum(exponent - 8, 10))
    scaled = (values * power_of_two(tl.where(is_nonfinite != 0, 127, 254 - scale)).to(ACC_DTYPE)).to(tl.float32)
    tl.store(cell + group_start + offsets, e4m3_code(scaled), mask=mask)
    tl.store(cell + scale_at, scale.to(tl.uint8))


class StoreCodedArguments(NamedTuple):
    """The arguments of the kernel `store_coded`, in order, without its constants, which `launch` passes by name."""

    kv: Tensor
    write_slots: Tensor
    memory: Tensor
    nonfinite_rows: Tensor
    kv_stride: int
    max_abs: float


@triton.jit
def store_coded(
    kv,
    write_slots,
    memory,
    nonfinite_rows,
    kv_stride,
    max_abs,
    CELL_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    REST_GROUPS: tl.constexpr,
    REST_SIZE: tl.constexpr,
    CELL_BYTES: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    CELL_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do what `store` does, but store cells in FP8. A new cell has `GROUPS` groups of `GROUP_SIZE` numbers, then
    `REST_GROUPS` groups of `REST_SIZE` numbers. A stored cell takes `CELL_BYTES` bytes. A cell with a magnitude above
    `max_abs` counts as not finite.
    """
    row, offsets = tl.program_id(0).to(tl.int64), tl.arange(0, CELL_BLOCK)
    kv += row * kv_stride
    cell = memory + tl.load(write_slots + row).to(tl.int64) * CELL_BYTES
    cell_values = tl.load(kv + offsets, mask=offsets < CELL_SIZE, other=0.0).to(ACC_DTYPE)
    is_nonfinite = tl.max(
        (~(tl.abs(cell_values) <= max_abs)).to(tl.int32), 0
    )  # the negated comparison is True for NaN too
    for group in range(GROUPS):
        store_group(kv, cell, CELL_SIZE + group, group * GROUP_SIZE, is_nonfinite, GROUP_SIZE, ACC_DTYPE, BLOCK)
    for group in range(REST_GROUPS):
        start = GROUPS * GROUP_SIZE + group * REST_SIZE
        store_group(kv, cell, CELL_SIZE + GROUPS + group, start, is_nonfinite, REST_SIZE, ACC_DTYPE, BLOCK)
    tl.store(nonfinite_rows + row, is_nonfinite)
