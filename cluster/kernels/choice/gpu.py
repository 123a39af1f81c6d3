"""The best tokens of each row, and the log-sum-exp of its scores, in one pass over the logits; the keys of noise.

A score is a tempered logit plus keyed noise. Scores exist only in registers: nothing of vocabulary size is written.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def mixed(x, between):
    """Return MurmurHash3's 32-bit finaliser of unsigned words; `between` is mixed in before the second round."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) ^ between
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def gumbel(key, hashes, WIDE: tl.constexpr):
    """Return Gumbel noise -log(-log(1 - u)) under a 64-bit `key`, for tokens with `hashes`; u is uniform in (0, 1)."""
    low, high = key.to(tl.uint64, bitcast=True).to(tl.uint32), (key.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32)
    bits = mixed(low ^ hashes.to(tl.uint32, bitcast=True), high) & 0x7FFFFFFF
    uniform = (bits.to(WIDE) + 0.5) * 4.656612873077393e-10  # (b + 0.5) / 2^31 for 31 bits b
    least: tl.constexpr = 1.1102230246251565e-16 if tl.float64 == WIDE else 5.9604644775390625e-08
    uniform = tl.minimum(uniform, 1 - least)  # rounding may give 1, for which log(0) = -inf
    # log(1 - u) for small u, as Kahan computes log1p: the factor u / (1 - rest) corrects the rounding of rest = 1 - u.
    rest = 1 - uniform
    log = tl.where(rest == 1, -uniform, tl.log(rest) * (uniform / tl.where(rest == 1, 1.0, 1 - rest)))
    return -tl.log(-log)


@triton.jit
def in_order(x):
    """Return signed integers in the order of the numbers `x`. NaN counts as infinity, the highest number. The lowest
    integer belongs to no number; it stands for "none".

    The bits of positive floats are ordered as integers; for negative floats all bits but the sign are inverted.
    """
    KIND: tl.constexpr = tl.int64 if x.dtype == tl.float64 else tl.int32
    bits = tl.where(x != x, float("inf"), x).to(KIND, bitcast=True)
    return bits ^ ((bits >> (KIND.primitive_bitwidth - 1)) & ((1 << (KIND.primitive_bitwidth - 1)) - 1))


@triton.jit
def number_of(order, WIDE: tl.constexpr):
    """Return the number from its integer: the inverse of `in_order`."""
    bits: tl.constexpr = WIDE.primitive_bitwidth - 1
    return (order ^ ((order >> bits) & ((1 << bits) - 1))).to(WIDE, bitcast=True)


@triton.jit
def unsigned(order):
    """Return the integers of `in_order` as unsigned ones in the same order, so that a search bit by bit starts at 0."""
    KIND: tl.constexpr = tl.uint64 if order.dtype == tl.int64 else tl.uint32
    return order.to(KIND, bitcast=True) ^ (tl.full([], 1, KIND) << (KIND.primitive_bitwidth - 1))


@triton.jit
def signed(order):
    """Return signed integers: the inverse of `unsigned`."""
    KIND: tl.constexpr = tl.int64 if order.dtype == tl.uint64 else tl.int32
    return (order ^ (tl.full([], 1, order.dtype) << (KIND.primitive_bitwidth - 1))).to(KIND, bitcast=True)


class BestOfPartArguments(NamedTuple):
    """What `best_of_part` takes, in its order; its constants follow by name."""

    logits: Tensor
    inverse: Tensor | None
    scale: Tensor | None
    keys: Tensor | None
    hashes: Tensor | None
    least: Tensor | None
    values: Tensor
    ids: Tensor
    sums: Tensor
    stride: int
    columns: int
    far: float


@triton.jit
def best_of_part(
    logits,
    inverse,
    scale,
    keys,
    hashes,
    least,
    values,
    ids,
    sums,
    stride,
    columns,
    far,
    NOISY: tl.constexpr,
    FILTERED: tl.constexpr,
    SUMMED: tl.constexpr,
    COUNT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the `COUNT` highest scores of one part of a row of `logits` `[T, columns]`: `values` and `ids`
    `[T, parts, COUNT]`. If `SUMMED`, also write m = max score and sum exp(score - m) to `sums` `[T, parts, 2]`.

    Scores are the logits unless `NOISY`. If `NOISY`, scores are logits * `inverse` `[T]` + noise * `scale` `[T]`;
    `gumbel` computes the noise from `keys` `[T]` and `hashes` `[columns]`. If `FILTERED` too, tempered logits below
    `least` `[T]` are lowered by `far`.
    """
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    LOWEST: tl.constexpr = -(1 << (WIDE.primitive_bitwidth - 1))
    at = part * BLOCK + tl.arange(0, BLOCK)
    held = at < columns
    score = tl.load(logits + row * stride + at, mask=held, other=0.0).to(WIDE)
    if NOISY:
        score *= tl.load(inverse + row).to(WIDE)
        if FILTERED:
            score = tl.where(score < tl.load(least + row), score - far, score)
        noise = gumbel(tl.load(keys + row), tl.load(hashes + at, mask=held, other=0), WIDE)
        score += noise * tl.load(scale + row).to(WIDE)
    place = row * parts + part
    if SUMMED:
        most = tl.max(tl.where(held, score, float("-inf")), 0)
        finite = tl.where(most == float("-inf"), 0.0, most)
        tl.store(sums + 2 * place, most)
        tl.store(sums + 2 * place + 1, tl.sum(tl.where(held, tl.exp(score - finite), 0.0), 0))
    order = tl.where(held, in_order(score), LOWEST)
    for one in tl.static_range(COUNT):
        highest, which = tl.max(order, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(values + place * COUNT + one, number_of(highest, WIDE))
        token = tl.where(highest == LOWEST, columns, part * BLOCK + which)  # `columns`: no token is left
        tl.store(ids + place * COUNT + one, token)
        order = tl.where(tl.arange(0, BLOCK) == which, LOWEST, order)


class BestOfAllArguments(NamedTuple):
    """What `best_of_all` takes, in its order; its constants follow by name."""

    part_values: Tensor
    part_ids: Tensor
    sums: Tensor
    values: Tensor
    ids: Tensor
    total: Tensor
    parts: int
    columns: int


@triton.jit
def best_of_all(
    part_values,
    part_ids,
    sums,
    values,
    ids,
    total,
    parts,
    columns,
    SUMMED: tl.constexpr,
    COUNT: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the results of the parts of each row: `values` and `ids` `[T, COUNT]`, log-sum-exp `total` `[T]`."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    LOWEST: tl.constexpr = -(1 << (WIDE.primitive_bitwidth - 1))
    held = at < parts * COUNT
    token = tl.load(part_ids + row * parts * COUNT + at, mask=held, other=columns)
    score = tl.load(part_values + row * parts * COUNT + at, mask=held, other=0.0)
    order = tl.where(token < columns, in_order(score), LOWEST)
    for one in tl.static_range(COUNT):
        highest, which = tl.max(order, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(values + row * COUNT + one, number_of(highest, WIDE))
        tl.store(ids + row * COUNT + one, tl.sum(tl.where(at == which, token, 0), 0).to(tl.int64))
        order = tl.where(at == which, LOWEST, order)
    if SUMMED:
        part = tl.arange(0, PARTS)
        most = tl.load(sums + 2 * (row * parts + part), mask=part < parts, other=float("-inf"))
        below = tl.load(sums + 2 * (row * parts + part) + 1, mask=part < parts, other=0.0)
        top = tl.max(most, 0)
        finite = tl.where(top == float("-inf"), 0.0, top)
        tl.store(total + row, finite + tl.log(tl.sum(below * tl.exp(most - finite), 0)))


@triton.jit
def mixed_64(x):
    """Return SplitMix64's finaliser of unsigned 64-bit numbers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


class KeysAlongArguments(NamedTuple):
    """What `keys_along` takes, in its order; its constants follow by name."""

    seeds: Tensor
    first: Tensor
    keys: Tensor
    stride: int
    count: int


@triton.jit
def keys_along(seeds, first, keys, stride, count, BLOCK: tl.constexpr):
    """Write the `keys` `[B, count]` of positions `first` `[B]` and the next ones, for `seeds` `[B]` at `stride`.

    key(seed, position) = mix(mix(seed + golden) + position * golden): one SplitMix64 generator for each seed.
    """
    request, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    golden = tl.full([BLOCK], 0x9E3779B97F4A7C15, tl.uint64)
    seed = mixed_64(tl.load(seeds + request * stride).to(tl.uint64, bitcast=True) + golden)
    position = tl.load(first + request).to(tl.uint64, bitcast=True) + at.to(tl.uint64)
    key = mixed_64(seed + position * golden)
    tl.store(keys + request * count + at, key.to(tl.int64, bitcast=True), mask=at < count)
