"""Moves of KV cells (a cell is the K and V of one token in one layer) between slots, in all layers at once."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class MoveArguments(NamedTuple):
    """The arguments of the kernel `move`, in order, without its constants, which `launch` passes by name."""

    memory: Tensor
    destination: Tensor
    source: Tensor
    window_pages: Tensor | None
    layer_stride: int
    slots_per_row: int


@triton.jit
def move(
    memory,
    destination,
    source,
    window_pages,
    layer_stride,
    slots_per_row,
    CELL_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """In each layer of `memory` `[layers, slots, CELL_SIZE]`, copy slot `source[r, i]` to slot `destination[r, i]`.
    `source` and `destination` are `[R, slots_per_row]`. If `PAGE_SIZE` is not 0, they are slots of other pools than
    `memory`, a window pool: page p of these pools is page `window_pages[p]` of `memory`.

    One program handles all slots of a row r, and reads them all before it writes. Different rows must not share slots.
    """
    layer, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offsets, slot_index = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SLOT_BLOCK)
    slot_mask = slot_index < slots_per_row
    source_slots = tl.load(source + row * slots_per_row + slot_index, mask=slot_mask, other=0)
    destination_slots = tl.load(destination + row * slots_per_row + slot_index, mask=slot_mask, other=0)
    if PAGE_SIZE > 0:
        source_pages = tl.load(window_pages + source_slots // PAGE_SIZE, mask=slot_mask, other=0).to(tl.int64)
        source_slots = source_pages * PAGE_SIZE + source_slots % PAGE_SIZE
        destination_pages = tl.load(window_pages + destination_slots // PAGE_SIZE, mask=slot_mask, other=0).to(tl.int64)
        destination_slots = destination_pages * PAGE_SIZE + destination_slots % PAGE_SIZE
    mask = slot_mask[:, None] & (offsets < CELL_SIZE)[None, :]
    base = memory + layer * layer_stride + offsets[None, :]
    cells = tl.load(base + source_slots[:, None] * CELL_SIZE, mask=mask, other=0.0)
    tl.debug_barrier()  # all threads of the program have read before one of them writes
    tl.store(base + destination_slots[:, None] * CELL_SIZE, cells, mask=mask)
