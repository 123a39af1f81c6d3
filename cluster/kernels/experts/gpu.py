"""Sorting of rows by expert, and weighted sums of each row's expert outputs.

All sums have a fixed order (no atomics), so results are reproducible.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class GroupArguments(NamedTuple):
    """What `group` takes, in its order; its constants follow by name."""

    chosen: Tensor
    source: Tensor
    expert: Tensor
    place: Tensor
    ends: Tensor
    count: int
    active: int


@triton.jit
def group(chosen, source, expert, place, ends, count, active, BLOCK: tl.constexpr):
    """Assign places to the choices of one expert per program, after the places of all lower experts: a stable counting
    sort.

    `chosen` `[count]` are the choices, `active` for each row. Writes `source` and `expert` `[count]` (the row and the
    expert at each place), `place` `[count]` (the place of each choice) and `ends` `[E]` (where an expert's places end).
    """
    own, at = tl.program_id(0), tl.arange(0, BLOCK)
    below, mine = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        given = tl.load(chosen + start + at, mask=start + at < count, other=tl.num_programs(0))
        below += (given < own).to(tl.int32)
        mine += (given == own).to(tl.int32)
    first = tl.sum(below, 0)  # the number of choices of lower experts is this expert's first place
    tl.store(ends + own, first + tl.sum(mine, 0))
    for start in range(0, count, BLOCK):
        given = tl.load(chosen + start + at, mask=start + at < count, other=tl.num_programs(0))
        is_own = given == own
        to = (first + tl.cumsum(is_own.to(tl.int32), 0) - 1).to(tl.int64)
        tl.store(place + start + at, to, mask=is_own)
        tl.store(source + to, ((start + at) // active).to(tl.int64), mask=is_own)
        tl.store(expert + to, given, mask=is_own)
        first += tl.sum(is_own.to(tl.int32), 0)


class CombineArguments(NamedTuple):
    """What `combine` takes, in its order; its constants follow by name."""

    made: Tensor
    place: Tensor
    weights: Tensor
    chosen: Tensor
    bias: Tensor | None
    out: Tensor
    size: int
    count: int


@triton.jit
def combine(
    made,
    place,
    weights,
    chosen,
    bias,
    out,
    size,
    count,
    ACTIVE: tl.constexpr,
    BIASED: tl.constexpr,
    WIDE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute `out` `[T, size]`: for each row, the sum of weights * (made + bias) over the row's `ACTIVE` places, in
    ascending order. `made` `[count, size]` has an entry per place, `weights` are `[T, ACTIVE]`. `bias` `[E, size]` has
    an entry per expert, and is used only if `BIASED`.
    """
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, SLOTS)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = at < size
    places = tl.load(place + row * ACTIVE + slot, mask=slot < ACTIVE, other=count)
    shares = tl.load(weights + row * ACTIVE + slot, mask=slot < ACTIVE, other=0.0).to(WIDE)
    if BIASED:
        experts = tl.load(chosen + row * ACTIVE + slot, mask=slot < ACTIVE, other=0)
    total = tl.zeros([BLOCK], WIDE)
    for _ in range(ACTIVE):
        next_place = tl.min(places, 0)  # the lowest place not yet added; added ones are set to `count`
        is_next = places == next_place
        part = tl.load(made + next_place * size + at, mask=held, other=0.0).to(WIDE)
        if BIASED:
            one = tl.sum(tl.where(is_next, experts, 0), 0)
            part += tl.load(bias + one * size + at, mask=held, other=0.0).to(WIDE)
        total += part * tl.sum(tl.where(is_next, shares, 0.0), 0)
        places = tl.where(is_next, count, places)
    tl.store(out + row * size + at, total.to(out.dtype.element_ty), mask=held)
