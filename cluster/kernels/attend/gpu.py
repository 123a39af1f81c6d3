"""Paged attention over trees and prompts (`AttentionMetadata`); a prefix is read once per block of lines and KV head.

A line is one query head of one row. A program has `LINES` lines of one request that share a KV head. The positions that
these lines see are cut into `SPLITS` parts. A program goes over one part, one tile at a time: first the tiles that all
lines see entirely, then the other tiles, which need masks. If another library has attended the first positions, they
are left out here and merged in `join`.

The softmax is online (as in FlashAttention), with scores times log2(e), because a GPU has an instruction for 2 ** x.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cluster.kernels.store.gpu import power

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def ones(word):
    """Return the number of bits set in each 32-bit word, by sums of 2, 4 and 8 adjacent bits, then of four bytes."""
    x = word.to(tl.uint32, bitcast=True)
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def part_of(
    memory,
    scales,
    cells,
    read,
    FROM: tl.constexpr,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    CODED: tl.constexpr,
    OF: tl.constexpr,
    ALL: tl.constexpr,
):
    """Return numbers `FROM` to `FROM + COUNT - 1` of the cells that begin at offsets `cells`, as `[cells, COUNT]`.

    A cell has `SIZE` numbers; beyond these the result is 0. If `ALL`, all cells are read. If not, cells that the mask
    `read` excludes give 0. Numbers are plain if `CODED` is 0. If `CODED` is 1, they are FP8 codes with one scale, at
    `scales`, and are decoded to dtype `OF`. If `CODED` is 2, also FP8, but numbers from `VALUE` on use the next scale.
    """
    at = FROM + tl.arange(0, COUNT)
    places = memory + cells[:, None] + at[None, :]
    if ALL and FROM + COUNT <= SIZE:
        found = tl.load(places)
    elif ALL:
        found = tl.load(places, mask=(at < SIZE)[None, :], other=0)
    else:
        found = tl.load(places, mask=read[:, None] & (at < SIZE)[None, :], other=0)
    if CODED > 0:
        scale = power(tl.load(scales + cells, mask=read, other=0))[:, None]
        if CODED == 2:
            second = power(tl.load(scales + cells + 1, mask=read, other=0))[:, None]
            scale = tl.where((at < VALUE)[None, :], scale, second)
        found = (found.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale).to(OF)
    return found


@triton.jit
def cells_of(pages, at, end, PAGE: tl.constexpr, CELL: tl.constexpr):
    """Return the offsets of the cells of positions `at`: (page * PAGE + at % PAGE) * CELL; page is 0 from `end` on."""
    page = tl.load(pages + at // PAGE, mask=at < end, other=0).to(tl.int64)
    return (page * PAGE + at % PAGE) * CELL


@triton.jit
def taken_in(
    highest,
    total,
    sums,
    q_front,
    q_back,
    memory,
    scales,
    cells,
    read,
    seen,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    BEHIND: tl.constexpr,
    SCALES: tl.constexpr,
    CODED: tl.constexpr,
    OF: tl.constexpr,
    FRONT: tl.constexpr,
    BACK: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    WIDEN: tl.constexpr,
    ALL: tl.constexpr,
):
    """Add one tile to an online softmax (highest score m, sum, weighted values). Lines see the cells in the mask
    `seen`; if `ALL`, they see all cells.

    With m' = max(m, scores): total' = total * 2^(m - m') + sum 2^(s - m'), and sums' likewise with the values.
    """
    # FP8: values have one scale, at `scales + SCALES`. FRONT or BACK of a latent has one scale too, unless the boundary
    # `VALUE` between latent and rotated key is inside it.
    ALONE: tl.constexpr = 1 if CODED else 0
    IN_FRONT: tl.constexpr = 1 if CODED == 2 and FRONT <= VALUE else CODED
    IN_BACK: tl.constexpr = 1 if CODED == 2 and FRONT >= VALUE else CODED
    SECOND: tl.constexpr = 1 if IN_BACK < CODED else 0
    key = part_of(memory, scales, cells, read, 0, FRONT, SIZE, VALUE, IN_FRONT, OF, ALL)
    if BEHIND == 0 and FRONT == VALUE:
        value = key  # a latent: its first VALUE numbers are the value
    else:
        value = part_of(memory + BEHIND, scales + SCALES, cells, read, 0, WIDTH, VALUE, VALUE, ALONE, OF, ALL)
    if WIDEN:
        key, value = key.to(WIDE), value.to(WIDE)
    scores = tl.dot(q_front, tl.trans(key), input_precision="ieee", out_dtype=WIDE)
    if BACK:
        behind = part_of(memory, scales + SECOND, cells, read, FRONT, BACK, SIZE, VALUE, IN_BACK, OF, ALL)
        if WIDEN:
            behind = behind.to(WIDE)
        scores = tl.dot(q_back, tl.trans(behind), scores, input_precision="ieee", out_dtype=WIDE)
    if not ALL:
        scores = tl.where(seen, scores, float("-inf"))
    most = tl.maximum(highest, tl.max(scores, 1) * SCALE)
    finite = tl.where(most == float("-inf"), 0.0, most)  # a line that has seen nothing yet: -inf - (-inf) would be NaN
    weights = tl.exp2(scores * SCALE - finite[:, None])
    kept = tl.exp2(highest - finite)
    total = total * kept + tl.sum(weights, 1)
    sums = tl.dot(weights.to(value.dtype), value, sums * kept[:, None], input_precision="ieee", out_dtype=WIDE)
    return most, total, sums


# Arguments that change from step to step: specialising on their values would compile the kernel again.
CHANGING = ["bits_stride", "first_row", "each", "width", "chunks", "first", "window"]


class AttendArguments(NamedTuple):
    """What `attend` takes, in its order; its constants follow by name."""

    q: Tensor
    memory: Tensor
    pages: Tensor
    bad: Tensor
    sinks: Tensor | None
    out: Tensor
    partials: Tensor | None
    tables: Tensor
    starts: Tensor
    bits: Tensor | None
    indptr: Tensor | None
    until: Tensor | None
    q_stride: int
    bits_stride: int
    first_row: int
    each: int
    width: int
    chunks: int
    pages_each: int
    first: int
    window: int


@triton.jit(do_not_specialize=CHANGING)
def attend(
    q,
    memory,
    pages,
    bad,
    sinks,
    out,
    partials,
    tables,
    starts,
    bits,
    indptr,
    until,
    q_stride,
    bits_stride,
    first_row,
    each,
    width,
    chunks,
    pages_each,
    first,
    window,
    TEXT: tl.constexpr,
    SINKS: tl.constexpr,
    SCALE: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    CELL: tl.constexpr,
    BEHIND: tl.constexpr,
    NUMBERS: tl.constexpr,
    SCALES: tl.constexpr,
    CODED: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    APART: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKS: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    FRONT: tl.constexpr,
    BACK: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attend rows of q `[T, HEADS, SIZE]` over `memory` `[slots, CELL]` -> `out` `[T, HEADS, VALUE]`. If `SPLITS` > 1
    or `APART`, write partial results to `partials` `[T, HEADS, SPLITS, WIDTH + 2]` instead.

    A cell has the keys of all KV heads, then the values, `BEHIND` numbers after the keys. In FP8 (`CODED`), `CELL` is
    in bytes, and the scales follow the `NUMBERS` codes: those of keys, and `SCALES` bytes later those of values.

    Tree: program p has lines of request i = p // blocks. The request's `each` rows see the first `starts[i]` positions,
    and of the `width` slots after these those in `bits`. If `APART`, positions before `until[i]` are left to another
    library. Prompts (`TEXT`): chunk i has the rows from `indptr[i]` on, at positions from `starts[i]` on. There are
    `chunks` chunks; `CHUNKS` is a power of two, at least `chunks`. Rows see all positions from 0 on unless `WINDOWED`;
    then `window`, `first` or `until` may exclude the first ones.

    `SCALE` is the softmax scale times log2(e). It is a constant, because a kernel takes a float argument as a float32,
    which is too coarse in float64. Keys are read in two parts, `FRONT` and `BACK`, as sizes such as 576 are no power of
    two.
    """
    REPEAT: tl.constexpr = HEADS // KV_HEADS
    SECOND: tl.constexpr = BACK if BACK > 0 else 1
    OF: tl.constexpr = q.dtype.element_ty
    task, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request, row, count, block = task, first_row, each, 0
    if TEXT:
        # Chunk i has ceil(rows_i * REPEAT / LINES) tasks. Their cumulative sum tells which chunk this task belongs to.
        chunk = tl.arange(0, CHUNKS)
        begins = tl.load(indptr + chunk, mask=chunk < chunks, other=0).to(tl.int32)
        counts = tl.load(indptr + chunk + 1, mask=chunk < chunks, other=0).to(tl.int32) - begins
        blocks = tl.cdiv(counts * REPEAT, LINES)
        until_task = tl.cumsum(blocks, 0)
        request = tl.sum((until_task <= task).to(tl.int32), 0)
        own_chunk = chunk == request  # none in a surplus task, which then has no rows
        row = first_row + tl.sum(tl.where(own_chunk, begins, 0), 0)
        count = tl.sum(tl.where(own_chunk, counts, 0), 0)
        block = task - tl.sum(tl.where(own_chunk, until_task - blocks, 0), 0)
        request = tl.minimum(request, chunks - 1)
    else:
        blocks = tl.cdiv(each * REPEAT, LINES)
        request, block = task // blocks, task % blocks
        row = request * each
    table, length = tl.load(tables + request).to(tl.int64), tl.load(starts + request).to(tl.int32)
    line = block * LINES + tl.arange(0, LINES)
    own_row, own_head = line // REPEAT, head * REPEAT + line % REPEAT
    live = own_row < count
    batch_row = (row + own_row).to(tl.int64)

    # Lines see positions `lowest` (0 unless `WINDOWED`) to `own`, all below `end`. In a tree, `own` is a label: the
    # row's position in the sequence, length + its number of bits - 1. Its window slot is another number.
    own = length + own_row
    end = tl.max(tl.where(live, own, -1), 0) + 1
    ancestors = bits
    if not TEXT:
        ancestors += request * bits_stride
        end = length + width
        if WINDOWED:
            own = tl.zeros([LINES], tl.int32) + (length - 1)
            for word in tl.static_range(WORDS):
                own += ones(tl.load(ancestors + own_row * WORDS + word, mask=live, other=0))
    begin, highest_lowest = 0, 0
    if WINDOWED:
        lowest = tl.where(window > 0, tl.maximum(own - window + 1, 0), 0)
        lowest = tl.where((first > 0) & (own >= first), tl.maximum(lowest, first), lowest)
        if APART:
            lowest = tl.maximum(lowest, tl.load(until + request).to(tl.int32))
        begin = tl.min(tl.where(live, lowest, end), 0) // TILE
        highest_lowest = tl.max(tl.where(live, lowest, 0), 0)
    # This split has tiles `start` to `stop - 1`.
    tiles = tl.cdiv(end, TILE) - begin
    share = tl.cdiv(tiles, SPLITS)
    start, stop = begin + split * share, begin + tl.minimum((split + 1) * share, tiles)

    queries = q + (batch_row * q_stride + own_head * SIZE)[:, None]
    front, back = tl.arange(0, FRONT), FRONT + tl.arange(0, SECOND)
    q_front = tl.load(queries + front[None, :], mask=live[:, None] & (front < SIZE)[None, :], other=0.0)
    q_back = tl.load(queries + back[None, :], mask=live[:, None] & (back < SIZE)[None, :], other=0.0)
    if WIDEN:
        q_front, q_back = q_front.to(WIDE), q_back.to(WIDE)
    pages += table * pages_each
    scales = memory + NUMBERS + head
    memory += head * SIZE
    highest = tl.full([LINES], float("-inf"), WIDE)
    total = tl.zeros([LINES], WIDE)
    sums = tl.zeros([LINES, WIDTH], WIDE)
    # All live lines see every position of tiles `whole_from` to `whole_until - 1`; the other tiles need masks.
    reach = tl.min(tl.where(live, own + 1, end), 0) if TEXT else length
    whole_from = tl.minimum(tl.maximum(tl.cdiv(highest_lowest, TILE), start), stop)
    whole_until = tl.minimum(tl.maximum(reach // TILE, whole_from), stop)
    for tile in range(whole_from, whole_until):
        at = tile * TILE + tl.arange(0, TILE)
        cells = cells_of(pages, at, end, PAGE, CELL)
        highest, total, sums = taken_in(
            highest, total, sums, q_front, q_back, memory, scales, cells, at < end, at, SCALE,
            SIZE, VALUE, BEHIND, SCALES, CODED, OF, FRONT, BACK, WIDTH, WIDE, WIDEN, ALL=True,
        )  # fmt: skip
    for tile in range(start, stop - (whole_until - whole_from)):
        tile += tl.where(tile >= whole_from, whole_until - whole_from, 0)  # skips the tiles of the first loop
        at = tile * TILE + tl.arange(0, TILE)
        cells = cells_of(pages, at, end, PAGE, CELL)
        if TEXT:
            seen = live[:, None] & (at[None, :] <= own[:, None])
            if WINDOWED:
                seen &= at[None, :] >= lowest[:, None]
        else:
            slot = at - length  # in the window; negative: committed, and visible
            seen = live[:, None] & (slot < 0)[None, :]
            # The label of a window slot: length + the number of the row's ancestors in lower slots, counted below.
            label = tl.zeros([LINES, TILE], tl.int32) + tl.minimum(at, length)[None, :]
            for word in tl.static_range(WORDS):
                held = tl.load(ancestors + own_row * WORDS + word, mask=live, other=0)[:, None]
                place = slot - 32 * word
                here, below = (place >= 0) & (place < 32) & (slot < width), place & 31
                seen |= here[None, :] & (((held >> below[None, :]) & 1) != 0)
                if WINDOWED:
                    fewer = ones(held & ((1 << below[None, :]) - 1))  # ancestors in lower bits of this word
                    label += tl.where(here[None, :], fewer, tl.where((place >= 32)[None, :], ones(held), 0))
            if WINDOWED:
                seen &= label >= lowest[:, None]
        highest, total, sums = taken_in(
            highest, total, sums, q_front, q_back, memory, scales, cells, at < end, seen, SCALE,
            SIZE, VALUE, BEHIND, SCALES, CODED, OF, FRONT, BACK, WIDTH, WIDE, WIDEN, ALL=False,
        )  # fmt: skip
    deep = tl.arange(0, WIDTH)
    place = batch_row * HEADS + own_head
    fits = live[:, None] & (deep < VALUE)[None, :]
    if SPLITS > 1 or APART:
        kept_at = (place * SPLITS + split) * (WIDTH + 2)
        tl.store(partials + kept_at[:, None] + deep[None, :], sums, mask=fits)
        tl.store(partials + kept_at + WIDTH, highest, mask=live)
        tl.store(partials + kept_at + WIDTH + 1, total, mask=live)
    else:
        if SINKS:
            # One more logit in the softmax, without a value.
            sink = tl.load(sinks + own_head, mask=live, other=0.0).to(WIDE) * LOG2E
            most = tl.maximum(highest, sink)
            kept = tl.exp2(highest - most)
            total = total * kept + tl.exp2(sink - most)
            sums *= kept[:, None]
        spoiled = tl.load(bad + batch_row, mask=live, other=0) != 0
        sums = sums / tl.where(total == 0, 1.0, total)[:, None]
        sums = tl.where(spoiled[:, None], float("nan"), sums)
        tl.store(out + place[:, None] * VALUE + deep[None, :], sums.to(out.dtype.element_ty), mask=fits)
