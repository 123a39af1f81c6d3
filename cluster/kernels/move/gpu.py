"""Moves of KV cells within windows, in all layers at once."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class MoveArguments(NamedTuple):
    """What `move` takes, in its order; its constants follow by name."""

    memory: Tensor
    destination: Tensor
    source: Tensor
    layer_stride: int
    count: int


@triton.jit
def move(memory, destination, source, layer_stride, count, CELL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """In each layer of `memory` `[layers, slots, CELL]`, copy slot `source[r, i]` to `destination[r, i]`, `[R, count]`.

    One program handles all slots of a row, and reads them all before it writes. Slots of different rows are disjoint.
    """
    layer, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at, entry = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    moved = entry < count
    given = tl.load(source + row * count + entry, mask=moved, other=0)
    taken = tl.load(destination + row * count + entry, mask=moved, other=0)
    held = moved[:, None] & (at < CELL)[None, :]
    base = memory + layer * layer_stride + at[None, :]
    cells = tl.load(base + given[:, None] * CELL, mask=held, other=0.0)
    tl.debug_barrier()  # all threads of the program have read before one of them writes
    tl.store(base + taken[:, None] * CELL, cells, mask=held)
