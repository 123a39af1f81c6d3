"""Filters top_k, top_p and min_p as one threshold per row, found by radix select, without a sort.

Probability mass is summed in integers, so the order of a sum does not matter. On a GPU the exponentials come from the
function that torch calls (`USE_LIBDEVICE`). A tempered logit is a logit divided by the temperature.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from cluster.kernels.choice.gpu import number_of_sort_key, sort_key, to_signed, to_unsigned


@triton.jit
def load_tempered(logits, inverse_temperature, offsets, mask, ACC_DTYPE: tl.constexpr):
    """Return tempered logits: load logits, and multiply them by the inverse temperature. Return 0 outside `mask`."""
    return tl.load(logits + offsets, mask=mask, other=0.0).to(ACC_DTYPE) * inverse_temperature


@triton.jit
def integer_mass(scores, max_score, top_k_threshold, MASS: tl.constexpr, USE_LIBDEVICE: tl.constexpr):
    """Return the integer mass floor(MASS * exp(score - max_score)) of each tempered logit `score`; 0 if the score is
    below `top_k_threshold`.
    """
    if USE_LIBDEVICE:
        probability = libdevice.exp(scores - max_score)
    else:
        probability = tl.exp(scores - max_score)
    return tl.where(scores < top_k_threshold, 0, (probability * MASS).to(tl.int64))


@triton.jit
def largest_threshold_with(
    logits,
    inverse_temperature,
    columns,
    needed_weight,
    max_score,
    top_k_threshold,
    BY_MASS: tl.constexpr,
    MASS: tl.constexpr,
    USE_LIBDEVICE: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the largest number t such that the tempered logits >= t together weigh at least `needed_weight`.

    Each logit weighs 1 or, if `BY_MASS`, its integer mass (`integer_mass`); all logits together must weigh at least
    `needed_weight`. The search is a radix select over the integers `to_unsigned(sort_key(scores))`: each pass over the
    row fixes the next two bits of t, the highest bits first.
    """
    UNSIGNED: tl.constexpr = tl.uint64 if tl.float64 == ACC_DTYPE else tl.uint32
    BITS: tl.constexpr = UNSIGNED.primitive_bitwidth
    digits = tl.arange(0, 4).to(UNSIGNED) << (BITS - 2)
    threshold_bits = tl.full([], 0, UNSIGNED)
    for _ in range(BITS // 2):
        trial_bits = threshold_bits | digits
        trial_weights = tl.zeros([4, BLOCK], tl.int64)
        for start in range(0, columns, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < columns
            scores = load_tempered(logits, inverse_temperature, offsets, mask, ACC_DTYPE)
            sort_keys = to_unsigned(sort_key(scores))
            if BY_MASS:
                weights_of_scores = tl.where(
                    mask, integer_mass(scores, max_score, top_k_threshold, MASS, USE_LIBDEVICE), 0
                )
            else:
                weights_of_scores = mask.to(tl.int64)
            trial_weights += tl.where(sort_keys[None, :] >= trial_bits[:, None], weights_of_scores[None, :], 0)
        is_enough = tl.sum(trial_weights, 1) >= needed_weight  # monotonic: a higher digit has less weight above it
        threshold_bits = threshold_bits | tl.max(tl.where(is_enough, digits, 0), 0)
        digits = digits >> 2
    return number_of_sort_key(to_signed(threshold_bits), ACC_DTYPE)


class ThresholdArguments(NamedTuple):
    """The arguments of the kernel `threshold`, in order, without its constants, which `launch` passes by name."""

    logits: Tensor
    inverse_temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    thresholds: Tensor
    stride: int
    columns: int


@triton.jit
def threshold(
    logits,
    inverse_temperature,
    top_k,
    top_p,
    log_min_p,
    thresholds,
    stride,
    columns,
    MASS: tl.constexpr,
    USE_LIBDEVICE: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the threshold `thresholds` `[T]` of each row of `logits` `[T, columns]`. The tokens whose tempered logit is
    at least the threshold are those that top_k, top_p and min_p all keep. Without filters the threshold is -inf. For a
    row with NaN or an infinite maximum it is NaN, which removes no token.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    temperature_factor = tl.load(inverse_temperature + row).to(ACC_DTYPE)
    max_scores, nan_counts = tl.full([BLOCK], float("-inf"), ACC_DTYPE), tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        scores = load_tempered(logits, temperature_factor, offsets, offsets < columns, ACC_DTYPE)
        scores = tl.where(offsets < columns, scores, float("-inf"))
        nan_counts += (scores != scores).to(tl.int32)
        max_scores = tl.where(scores > max_scores, scores, max_scores)
    max_score = tl.max(max_scores, 0)
    is_finite = (tl.sum(nan_counts, 0) == 0) & (max_score - max_score == 0)
    lower_bound = tl.full([], float("-inf"), ACC_DTYPE)
    if is_finite:
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        if (k > 0) & (k < columns):
            lower_bound = largest_threshold_with(
                logits,
                temperature_factor,
                columns,
                k,
                max_score,
                max_score,
                False,
                MASS,
                USE_LIBDEVICE,
                ACC_DTYPE,
                BLOCK,
            )
        top_k_threshold = lower_bound
        if p < 1:
            masses = tl.zeros([BLOCK], tl.int64)
            for start in range(0, columns, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                mask = offsets < columns
                scores = load_tempered(logits, temperature_factor, offsets, mask, ACC_DTYPE)
                masses += tl.where(mask, integer_mass(scores, max_score, top_k_threshold, MASS, USE_LIBDEVICE), 0)
            needed_mass = tl.ceil(tl.sum(masses, 0).to(tl.float64) * p.to(tl.float64)).to(tl.int64)
            needed_mass = tl.maximum(needed_mass, 1)
            top_p_threshold = largest_threshold_with(
                logits,
                temperature_factor,
                columns,
                needed_mass,
                max_score,
                top_k_threshold,
                True,
                MASS,
                USE_LIBDEVICE,
                ACC_DTYPE,
                BLOCK,
            )
            lower_bound = tl.maximum(lower_bound, top_p_threshold)
        # min_p keeps the scores that are at least max_score + log(min_p). The token with the highest score always
        # stays.
        lower_bound = tl.minimum(tl.maximum(lower_bound, max_score + tl.load(log_min_p + row).to(ACC_DTYPE)), max_score)
    tl.store(thresholds + row, tl.where(is_finite, lower_bound, float("nan")))
