"""New cells go to their slots of a KV pool: as they are, or as codes of FP8 with their scales (arch/cell.py)."""

import triton
import triton.language as tl


@triton.jit
def store(kv, write, memory, bad, kv_stride, CELL: tl.constexpr, BLOCK: tl.constexpr):
    """New cells `kv` `[T, CELL]` go to their slots `write` `[T]` of `memory`: zeros in place of those that are not
    finite, whose rows are noted in `bad` `[T]`.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    held = at < CELL
    cell = tl.load(kv + row * kv_stride + at, mask=held, other=0.0)
    spoiled = tl.max((held & (cell - cell != 0)).to(tl.int32), 0)
    cell = tl.where(spoiled != 0, 0.0, cell)
    tl.store(memory + tl.load(write + row).to(tl.int64) * CELL + at, cell, mask=held)
    tl.store(bad + row, spoiled)


@triton.jit
def power(byte):
    """2 ** (byte - 127)."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def code_of(x):
    """The byte of the nearest e4m3, ties to even, of float32 numbers from -448 to 448. Below the smallest normal number
    codes are 2^-9 apart, as floats are from 2^14 on.
    """
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) & 0xFF
    return (tl.where(size < 0x3C800000, tiny, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_group(kv, cell, scale_at, first, spoiled, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The numbers `first` to `first` + `SIZE` - 1 of `kv` go to their `cell` as codes with one scale (arch/cell.py)."""
    at = tl.arange(0, BLOCK)
    held = at < SIZE
    own = tl.load(kv + first + at, mask=held, other=0.0).to(WIDE)
    own = tl.where(spoiled != 0, 0.0, own)
    most = tl.max(tl.abs(own), 0)
    if tl.float64 == WIDE:
        exponent = ((most.to(tl.int64, bitcast=True) + ((1 << 50) - 1)) >> 52).to(tl.int32) - 1023 + 127
    else:
        exponent = (most.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23
    scale = tl.where(spoiled != 0, 0, tl.maximum(exponent - 8, 10))
    fitted = (own * power(tl.where(spoiled != 0, 127, 254 - scale)).to(WIDE)).to(tl.float32)
    tl.store(cell + first + at, code_of(fitted), mask=held)
    tl.store(cell + scale_at, scale.to(tl.uint8))


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
    """As `store`, in FP8: `GROUPS` of `SIZE` numbers, then one of `REST` if that is not 0, to cells of `BYTES`. What
    has a number above `most` is not finite.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, ALL)
    kv += row * kv_stride
    cell = memory + tl.load(write + row).to(tl.int64) * BYTES
    whole = tl.load(kv + at, mask=at < NUMBERS, other=0.0).to(WIDE)
    spoiled = tl.max((~(tl.abs(whole) <= most)).to(tl.int32), 0)
    for group in range(GROUPS):
        store_group(kv, cell, NUMBERS + group, group * SIZE, spoiled, SIZE, WIDE, BLOCK)
    if REST:
        store_group(kv, cell, NUMBERS + GROUPS, GROUPS * SIZE, spoiled, REST, WIDE, BLOCK)
    tl.store(bad + row, spoiled)
