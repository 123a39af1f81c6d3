"""The best tokens of each row of logits, and the log-sum-exp of the row's scores, in one pass; and the keys of noise.

In sampling, a score is a tempered logit (divided by the temperature) plus Gumbel noise that a key determines; otherwise
it is the logit. Scores exist only in registers: nothing of vocabulary size is written.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def murmur_mix(x, salt):
    """Return MurmurHash3's 32-bit finaliser of unsigned words; `salt` is mixed in before the second round."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) ^ salt
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def gumbel(key, hashes, ACC_DTYPE: tl.constexpr):
    """Return Gumbel noise -log(-log(1 - u)) for tokens with `hashes`; u, uniform in (0, 1), is computed from the
    token's hash and the 64-bit `key`.
    """
    key_low, key_high = (
        key.to(tl.uint64, bitcast=True).to(tl.uint32),
        (key.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32),
    )
    bits = murmur_mix(key_low ^ hashes.to(tl.uint32, bitcast=True), key_high) & 0x7FFFFFFF
    uniform = (bits.to(ACC_DTYPE) + 0.5) * 4.656612873077393e-10  # (b + 0.5) / 2^31 for 31 bits b
    half_epsilon: tl.constexpr = 1.1102230246251565e-16 if tl.float64 == ACC_DTYPE else 5.9604644775390625e-08
    uniform = tl.minimum(uniform, 1 - half_epsilon)  # rounding may give 1, for which log(0) = -inf
    # log(1 - u) for small u, as Kahan computes log1p: the factor u / (1 - rest) corrects the rounding of rest = 1 - u.
    one_minus_uniform = 1 - uniform
    log_of_one_minus_uniform = tl.where(
        one_minus_uniform == 1,
        -uniform,
        tl.log(one_minus_uniform) * (uniform / tl.where(one_minus_uniform == 1, 1.0, 1 - one_minus_uniform)),
    )
    return -tl.log(-log_of_one_minus_uniform)


@triton.jit
def sort_key(x):
    """Return signed integers that are in the same order as the numbers `x`. NaN counts as infinity, the highest number.
    The lowest integer belongs to no number; it stands for "none".

    The bits of positive floats are ordered as integers; for negative floats all bits but the sign are inverted.
    """
    KIND: tl.constexpr = tl.int64 if x.dtype == tl.float64 else tl.int32
    bits = tl.where(x != x, float("inf"), x).to(KIND, bitcast=True)
    return bits ^ ((bits >> (KIND.primitive_bitwidth - 1)) & ((1 << (KIND.primitive_bitwidth - 1)) - 1))


@triton.jit
def number_of_sort_key(sort_keys, ACC_DTYPE: tl.constexpr):
    """Return the number from its integer: the inverse of `sort_key`."""
    SIGN_SHIFT: tl.constexpr = ACC_DTYPE.primitive_bitwidth - 1
    return (sort_keys ^ ((sort_keys >> SIGN_SHIFT) & ((1 << SIGN_SHIFT) - 1))).to(ACC_DTYPE, bitcast=True)


@triton.jit
def to_unsigned(sort_keys):
    """Return the integers of `sort_key` as unsigned integers in the same order, so that a search that fixes one bit
    after the other can start at 0.
    """
    KIND: tl.constexpr = tl.uint64 if sort_keys.dtype == tl.int64 else tl.uint32
    return sort_keys.to(KIND, bitcast=True) ^ (tl.full([], 1, KIND) << (KIND.primitive_bitwidth - 1))


@triton.jit
def to_signed(sort_keys):
    """Return signed integers: the inverse of `to_unsigned`."""
    KIND: tl.constexpr = tl.int64 if sort_keys.dtype == tl.uint64 else tl.int32
    return (sort_keys ^ (tl.full([], 1, sort_keys.dtype) << (KIND.primitive_bitwidth - 1))).to(KIND, bitcast=True)


class BestOfPartArguments(NamedTuple):
    """The arguments of the kernel `best_of_part`, in order, without its constants, which `launch` passes by name."""

    logits: Tensor
    inverse_temperature: Tensor | None
    noise_scale: Tensor | None
    keys: Tensor | None
    hashes: Tensor | None
    thresholds: Tensor | None
    values: Tensor
    ids: Tensor
    sums: Tensor
    stride: int
    columns: int
    filter_penalty: float


@triton.jit
def best_of_part(
    logits,
    inverse_temperature,
    noise_scale,
    keys,
    hashes,
    thresholds,
    values,
    ids,
    sums,
    stride,
    columns,
    filter_penalty,
    IS_SAMPLED: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    WITH_LOGSUMEXP: tl.constexpr,
    COUNT: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the `COUNT` highest scores of one part of a row of `logits` `[T, columns]`, and their token ids, to
    `values` and `ids` `[T, parts, COUNT]`. If `WITH_LOGSUMEXP`, also write m = max score and sum exp(score - m) to
    `sums` `[T, parts, 2]`.

    Scores are the logits unless `IS_SAMPLED`. If `IS_SAMPLED`, scores are logits * `inverse_temperature` `[T]` + noise
    * `noise_scale` `[T]`; `gumbel` computes the noise from `keys` `[T]` and `hashes` `[columns]`. If `HAS_FILTERS` too,
    tempered logits below `thresholds` `[T]` are lowered by `filter_penalty`.
    """
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    LOWEST: tl.constexpr = -(1 << (ACC_DTYPE.primitive_bitwidth - 1))
    offsets = part * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < columns
    scores = tl.load(logits + row * stride + offsets, mask=mask, other=0.0).to(ACC_DTYPE)
    if IS_SAMPLED:
        scores *= tl.load(inverse_temperature + row).to(ACC_DTYPE)
        if HAS_FILTERS:
            scores = tl.where(scores < tl.load(thresholds + row), scores - filter_penalty, scores)
        noise = gumbel(tl.load(keys + row), tl.load(hashes + offsets, mask=mask, other=0), ACC_DTYPE)
        scores += noise * tl.load(noise_scale + row).to(ACC_DTYPE)
    part_index = row * parts + part
    if WITH_LOGSUMEXP:
        max_score = tl.max(tl.where(mask, scores, float("-inf")), 0)
        finite_max = tl.where(max_score == float("-inf"), 0.0, max_score)
        tl.store(sums + 2 * part_index, max_score)
        tl.store(sums + 2 * part_index + 1, tl.sum(tl.where(mask, tl.exp(scores - finite_max), 0.0), 0))
    sort_keys = tl.where(mask, sort_key(scores), LOWEST)
    for rank in tl.static_range(COUNT):
        best_key, best_index = tl.max(sort_keys, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(values + part_index * COUNT + rank, number_of_sort_key(best_key, ACC_DTYPE))
        token = tl.where(best_key == LOWEST, columns, part * BLOCK + best_index)  # `columns`: no token is left
        tl.store(ids + part_index * COUNT + rank, token)
        sort_keys = tl.where(tl.arange(0, BLOCK) == best_index, LOWEST, sort_keys)


class BestOfAllArguments(NamedTuple):
    """The arguments of the kernel `best_of_all`, in order, without its constants, which `launch` passes by name."""

    part_values: Tensor
    part_ids: Tensor
    sums: Tensor
    values: Tensor
    ids: Tensor
    logsumexp: Tensor
    parts: int
    columns: int


@triton.jit
def best_of_all(
    part_values,
    part_ids,
    sums,
    values,
    ids,
    logsumexp,
    parts,
    columns,
    WITH_LOGSUMEXP: tl.constexpr,
    COUNT: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the results of the parts of each row into `values` and `ids` `[T, COUNT]` and, if `WITH_LOGSUMEXP`, into
    the log-sum-exp `logsumexp` `[T]`.
    """
    row, offsets = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    LOWEST: tl.constexpr = -(1 << (ACC_DTYPE.primitive_bitwidth - 1))
    mask = offsets < parts * COUNT
    tokens = tl.load(part_ids + row * parts * COUNT + offsets, mask=mask, other=columns)
    scores = tl.load(part_values + row * parts * COUNT + offsets, mask=mask, other=0.0)
    sort_keys = tl.where(tokens < columns, sort_key(scores), LOWEST)
    for rank in tl.static_range(COUNT):
        best_key, best_index = tl.max(sort_keys, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(values + row * COUNT + rank, number_of_sort_key(best_key, ACC_DTYPE))
        tl.store(ids + row * COUNT + rank, tl.sum(tl.where(offsets == best_index, tokens, 0), 0).to(tl.int64))
        sort_keys = tl.where(offsets == best_index, LOWEST, sort_keys)
    if WITH_LOGSUMEXP:
        part_offsets = tl.arange(0, PARTS)
        part_max = tl.load(sums + 2 * (row * parts + part_offsets), mask=part_offsets < parts, other=float("-inf"))
        part_sums = tl.load(sums + 2 * (row * parts + part_offsets) + 1, mask=part_offsets < parts, other=0.0)
        max_score = tl.max(part_max, 0)
        finite_max = tl.where(max_score == float("-inf"), 0.0, max_score)
        tl.store(logsumexp + row, finite_max + tl.log(tl.sum(part_sums * tl.exp(part_max - finite_max), 0)))


@triton.jit
def splitmix(x):
    """Return SplitMix64's finaliser of unsigned 64-bit numbers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


class KeysAlongArguments(NamedTuple):
    """The arguments of the kernel `keys_along`, in order, without its constants, which `launch` passes by name."""

    seeds: Tensor
    first_positions: Tensor
    keys: Tensor
    seeds_stride: int
    count: int


@triton.jit
def keys_along(seeds, first_positions, keys, seeds_stride, count, BLOCK: tl.constexpr):
    """Write the noise keys of `count` positions for each of B requests to `keys` `[B, count]`. The positions of request
    b begin at `first_positions[b]`. `seeds` `[B]` has the stride `seeds_stride`.

    key(seed, position) = mix(mix(seed + golden) + position * golden), where mix is `splitmix`: one SplitMix64 generator
    for each seed.
    """
    request, offsets = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    golden = tl.full([BLOCK], 0x9E3779B97F4A7C15, tl.uint64)
    seed = splitmix(tl.load(seeds + request * seeds_stride).to(tl.uint64, bitcast=True) + golden)
    positions = tl.load(first_positions + request).to(tl.uint64, bitcast=True) + offsets.to(tl.uint64)
    noise_keys = splitmix(seed + positions * golden)
    tl.store(keys + request * count + offsets, noise_keys.to(tl.int64, bitcast=True), mask=offsets < count)
