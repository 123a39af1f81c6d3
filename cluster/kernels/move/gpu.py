"""KV moves within windows, over all layers at once."""

import triton
import triton.language as tl


@triton.jit
def move(memory, destination, source, layer_stride, count, CELL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """In each layer of `memory` `[layers, slots, CELL]` slot `source[r, i]` goes to `destination[r, i]`, `[R, count]`.

    All that is moved within row r is read before any of it is written; rows are each other's business in no way.
    """
    layer, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at, entry = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    moved = entry < count
    given = tl.load(source + row * count + entry, mask=moved, other=0)
    taken = tl.load(destination + row * count + entry, mask=moved, other=0)
    held = moved[:, None] & (at < CELL)[None, :]
    base = memory + layer * layer_stride + at[None, :]
    cells = tl.load(base + given[:, None] * CELL, mask=held, other=0.0)
    tl.debug_barrier()
    tl.store(base + taken[:, None] * CELL, cells, mask=held)
