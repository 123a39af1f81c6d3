"""Sorting of rows by expert, and weighted sums of each row's expert outputs.

All sums have a fixed order (no atomics), so results are reproducible.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class GroupArguments(NamedTuple):
    """The arguments of the kernel `group`, in order, without its constants, which `launch` passes by name."""

    topk_ids: Tensor
    source_rows: Tensor
    place_experts: Tensor
    places_of_choices: Tensor
    ends: Tensor
    num_choices: int
    experts_per_row: int


@triton.jit
def group(
    topk_ids, source_rows, place_experts, places_of_choices, ends, num_choices, experts_per_row, BLOCK: tl.constexpr
):
    """Assign places to the choices of one expert per program. These places come after those of all lower experts:
    the kernel is a stable counting sort.

    `topk_ids` `[num_choices]` are the choices: the experts of each row, `experts_per_row` per row. Writes `source_rows`
    and `place_experts` `[num_choices]` (the row and the expert at each place), `places_of_choices` `[num_choices]` (the
    place of each choice) and `ends` `[E]` (the first place after those of each expert).
    """
    own_expert, offsets = tl.program_id(0), tl.arange(0, BLOCK)
    lower_counts, own_counts = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_choices, BLOCK):
        expert_ids = tl.load(topk_ids + start + offsets, mask=start + offsets < num_choices, other=tl.num_programs(0))
        lower_counts += (expert_ids < own_expert).to(tl.int32)
        own_counts += (expert_ids == own_expert).to(tl.int32)
    first = tl.sum(lower_counts, 0)  # the number of choices of lower experts is this expert's first place
    tl.store(ends + own_expert, first + tl.sum(own_counts, 0))
    for start in range(0, num_choices, BLOCK):
        expert_ids = tl.load(topk_ids + start + offsets, mask=start + offsets < num_choices, other=tl.num_programs(0))
        is_own_choice = expert_ids == own_expert
        target_places = (first + tl.cumsum(is_own_choice.to(tl.int32), 0) - 1).to(tl.int64)
        tl.store(places_of_choices + start + offsets, target_places, mask=is_own_choice)
        tl.store(
            source_rows + target_places,
            ((start + offsets) // experts_per_row).to(tl.int64),
            mask=is_own_choice,
        )
        tl.store(place_experts + target_places, expert_ids, mask=is_own_choice)
        first += tl.sum(is_own_choice.to(tl.int32), 0)


class CombineArguments(NamedTuple):
    """The arguments of the kernel `combine`, in order, without its constants, which `launch` passes by name."""

    expert_outputs: Tensor
    places_of_choices: Tensor
    weights: Tensor
    topk_ids: Tensor
    bias: Tensor | None
    out: Tensor
    size: int
    num_choices: int


@triton.jit
def combine(
    expert_outputs,
    places_of_choices,
    weights,
    topk_ids,
    bias,
    out,
    size,
    num_choices,
    EXPERTS_PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write to `out` `[T, size]`, for each row, the sum of weight * (expert output + bias) over the row's
    `EXPERTS_PER_ROW` places, in ascending order of places. `expert_outputs` `[num_choices, size]` has one row per
    place; `weights` are `[T, EXPERTS_PER_ROW]`. `bias` `[E, size]` has one row per expert; without `HAS_BIAS` it is not
    read.
    """
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS_BLOCK)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    places = tl.load(places_of_choices + row * EXPERTS_PER_ROW + slot, mask=slot < EXPERTS_PER_ROW, other=num_choices)
    row_weights = tl.load(weights + row * EXPERTS_PER_ROW + slot, mask=slot < EXPERTS_PER_ROW, other=0.0).to(ACC_DTYPE)
    if HAS_BIAS:
        experts = tl.load(topk_ids + row * EXPERTS_PER_ROW + slot, mask=slot < EXPERTS_PER_ROW, other=0)
    total = tl.zeros([BLOCK], ACC_DTYPE)
    for _ in range(EXPERTS_PER_ROW):
        next_place = tl.min(places, 0)  # the lowest place not yet added; added ones are set to `num_choices`
        is_next = places == next_place
        output = tl.load(expert_outputs + next_place * size + offsets, mask=mask, other=0.0).to(ACC_DTYPE)
        if HAS_BIAS:
            expert_id = tl.sum(tl.where(is_next, experts, 0), 0)
            output += tl.load(bias + expert_id * size + offsets, mask=mask, other=0.0).to(ACC_DTYPE)
        total += output * tl.sum(tl.where(is_next, row_weights, 0.0), 0)
        places = tl.where(is_next, num_choices, places)
    tl.store(out + row * size + offsets, total.to(out.dtype.element_ty), mask=mask)
