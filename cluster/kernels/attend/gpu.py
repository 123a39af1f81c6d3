"""Paged attention over trees and prompts (`AttentionMetadata`); a prefix is read once per block of lines and KV head.

A line is one query head of one row. A program has `LINES` lines of one request that share a KV head. The positions that
these lines see are cut into `SPLITS` splits. A program goes over one split, one tile at a time: first the tiles that
all lines see entirely, then the other tiles, which need masks. If another library has attended the first positions,
they are left out here and merged in `join`.

The softmax is online (as in FlashAttention), with scores times log2(e), because a GPU has an instruction for 2 ** x.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cluster.kernels.attend_tile.gpu import add_tile, cell_offsets, popcount

LOG2E = tl.constexpr(1.4426950408889634)

# Arguments that change from step to step: specialising on their values would compile the kernel again.
CHANGING_ARGUMENTS = ["bits_stride", "first_row", "rows_per_request", "width", "chunks", "first", "window"]


class AttendArguments(NamedTuple):
    """The arguments of the kernel `attend`, in order, without its constants, which `launch` passes by name."""

    q: Tensor
    memory: Tensor
    pages: Tensor
    window_pages: Tensor | None
    nonfinite_rows: Tensor
    sinks: Tensor | None
    out: Tensor
    partials: Tensor | None
    table_rows: Tensor
    starts: Tensor
    bits: Tensor | None
    indptr: Tensor | None
    prefix_lens: Tensor | None
    q_stride: int
    bits_stride: int
    first_row: int
    rows_per_request: int
    width: int
    chunks: int
    pages_per_request: int
    first: int
    window: int


@triton.jit(do_not_specialize=CHANGING_ARGUMENTS)
def attend(
    q,
    memory,
    pages,
    window_pages,
    nonfinite_rows,
    sinks,
    out,
    partials,
    table_rows,
    starts,
    bits,
    indptr,
    prefix_lens,
    q_stride,
    bits_stride,
    first_row,
    rows_per_request,
    width,
    chunks,
    pages_per_request,
    first,
    window,
    IS_PROMPT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SCALE: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CELL_SIZE: tl.constexpr,
    VALUES_OFFSET: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    VALUE_SCALES_OFFSET: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    SKIP_PREFIX: tl.constexpr,
    HAS_LOWER_LIMIT: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    IS_WINDOW_POOL: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    FRONT: tl.constexpr,
    BACK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend rows of q `[T, HEADS, HEAD_DIM]` over `memory` `[slots, CELL_SIZE]` -> `out` `[T, HEADS, VALUE_DIM]`. If
    `SPLITS` > 1 or `SKIP_PREFIX`, write partial results to `partials` `[T, HEADS, SPLITS, VALUE_BLOCK + 2]` instead.

    A cell (K and V of one token) has the keys of all KV heads and then, from number `VALUES_OFFSET` on, their values. A
    latent cell is a key of one head, and begins with its value (`VALUES_OFFSET` 0). In FP8 (`KEY_SCALES` > 0),
    `CELL_SIZE` is in bytes, and a cell has `SCALES_OFFSET` codes, then the scales. A value's scale is
    `VALUE_SCALES_OFFSET` bytes after the key's. A key has `KEY_SCALES` scales: see `load_cells`.

    Trees: program p has lines of request i = p // blocks. The request's `rows_per_request` rows see the first
    `starts[i]` positions. Then come `width` slots for the nodes of its tree (window slots), of which a row sees those
    set in its `bits`. If `SKIP_PREFIX`, another library attends the positions before `prefix_lens[i]`.
    Prompts (`IS_PROMPT`): chunk i has the rows from `indptr[i]` on, at positions from `starts[i]` on. There are
    `chunks` chunks; `MAX_CHUNKS` is a power of two, at least `chunks`.
    If `HAS_LOWER_LIMIT`, the sliding `window`, `first` (see `AttentionMetadata`) or `prefix_lens` may hide the first
    positions from a row. If not, a row sees all positions from 0 on. If `IS_CHUNKED`, `window` is -c, and a row sees
    the positions of its own chunk of c.

    `SCALE` is the softmax scale times log2(e). It is a constant, because a kernel takes a float argument as a float32,
    which is too coarse for float64 pools. Keys are read in two parts of `FRONT` and `BACK` numbers, because a size such
    as 576 is not a power of two.
    """
    HEADS_PER_KV_HEAD: tl.constexpr = HEADS // KV_HEADS
    BACK_OR_1: tl.constexpr = BACK if BACK > 0 else 1
    DTYPE: tl.constexpr = q.dtype.element_ty
    program, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request, row, chunk_rows, block = program, first_row, rows_per_request, 0
    if IS_PROMPT:
        # Chunk i has ceil(rows_i * HEADS_PER_KV_HEAD / LINES) programs. Their cumulative sum gives the chunk of each.
        chunk = tl.arange(0, MAX_CHUNKS)
        chunk_begins = tl.load(indptr + chunk, mask=chunk < chunks, other=0).to(tl.int32)
        all_chunk_rows = tl.load(indptr + chunk + 1, mask=chunk < chunks, other=0).to(tl.int32) - chunk_begins
        blocks = tl.cdiv(all_chunk_rows * HEADS_PER_KV_HEAD, LINES)
        program_ends = tl.cumsum(blocks, 0)
        request = tl.sum((program_ends <= program).to(tl.int32), 0)
        is_own_chunk = chunk == request  # all False in a surplus program, which then has no rows
        row = first_row + tl.sum(tl.where(is_own_chunk, chunk_begins, 0), 0)
        chunk_rows = tl.sum(tl.where(is_own_chunk, all_chunk_rows, 0), 0)
        block = program - tl.sum(tl.where(is_own_chunk, program_ends - blocks, 0), 0)
        request = tl.minimum(request, chunks - 1)
    else:
        blocks = tl.cdiv(rows_per_request * HEADS_PER_KV_HEAD, LINES)
        request, block = program // blocks, program % blocks
        row = request * rows_per_request
    table, length = tl.load(table_rows + request).to(tl.int64), tl.load(starts + request).to(tl.int32)
    lines = block * LINES + tl.arange(0, LINES)
    line_rows, line_heads = lines // HEADS_PER_KV_HEAD, head * HEADS_PER_KV_HEAD + lines % HEADS_PER_KV_HEAD
    is_line = line_rows < chunk_rows
    batch_rows = (row + line_rows).to(tl.int64)

    # Lines see positions `first_visible` (0 unless `HAS_LOWER_LIMIT`) to `last_visible`, all below `end`. In a tree,
    # `last_visible` is the row's position in the sequence (its label): length + the number of its bits - 1. A window
    # slot j is read at position length + j, which can be higher than the label of the row in that slot.
    last_visible = length + line_rows
    end = tl.max(tl.where(is_line, last_visible, -1), 0) + 1
    ancestors = bits
    if not IS_PROMPT:
        ancestors += request * bits_stride
        end = length + width
        if HAS_LOWER_LIMIT:
            last_visible = tl.zeros([LINES], tl.int32) + (length - 1)
            for word in tl.static_range(MASK_WORDS):
                last_visible += popcount(tl.load(ancestors + line_rows * MASK_WORDS + word, mask=is_line, other=0))
    begin, max_first_visible = 0, 0
    if HAS_LOWER_LIMIT:
        first_visible = tl.where(window > 0, tl.maximum(last_visible - window + 1, 0), 0)
        if IS_CHUNKED:
            first_visible = last_visible - last_visible % -window
        first_visible = tl.where((first > 0) & (last_visible >= first), tl.maximum(first_visible, first), first_visible)
        if SKIP_PREFIX:
            first_visible = tl.maximum(first_visible, tl.load(prefix_lens + request).to(tl.int32))
        begin = tl.min(tl.where(is_line, first_visible, end), 0) // TILE
        max_first_visible = tl.max(tl.where(is_line, first_visible, 0), 0)
    # This split has tiles `start` to `stop - 1`.
    tiles = tl.cdiv(end, TILE) - begin
    tiles_per_split = tl.cdiv(tiles, SPLITS)
    start, stop = begin + split * tiles_per_split, begin + tl.minimum((split + 1) * tiles_per_split, tiles)

    q_rows = q + (batch_rows * q_stride + line_heads * HEAD_DIM)[:, None]
    front, back = tl.arange(0, FRONT), FRONT + tl.arange(0, BACK_OR_1)
    q_front = tl.load(q_rows + front[None, :], mask=is_line[:, None] & (front < HEAD_DIM)[None, :], other=0.0)
    q_back = tl.load(q_rows + back[None, :], mask=is_line[:, None] & (back < HEAD_DIM)[None, :], other=0.0)
    if UPCAST:
        q_front, q_back = q_front.to(ACC_DTYPE), q_back.to(ACC_DTYPE)
    pages += table * pages_per_request
    scales = memory + SCALES_OFFSET + head
    values = memory + VALUES_OFFSET + head * VALUE_DIM
    memory += head * HEAD_DIM
    max_score = tl.full([LINES], float("-inf"), ACC_DTYPE)
    weight_sum = tl.zeros([LINES], ACC_DTYPE)
    value_sum = tl.zeros([LINES, VALUE_BLOCK], ACC_DTYPE)
    # All lines in `is_line` see every position of tiles `whole_from` to `whole_until - 1`; the other tiles need masks.
    visible_to_all = tl.min(tl.where(is_line, last_visible + 1, end), 0) if IS_PROMPT else length
    whole_from = tl.minimum(tl.maximum(tl.cdiv(max_first_visible, TILE), start), stop)
    whole_until = tl.minimum(tl.maximum(visible_to_all // TILE, whole_from), stop)
    for tile in range(whole_from, whole_until):
        positions = tile * TILE + tl.arange(0, TILE)
        cells = cell_offsets(pages, window_pages, positions, end, PAGE_SIZE, CELL_SIZE, IS_WINDOW_POOL)
        max_score, weight_sum, value_sum = add_tile(
            max_score, weight_sum, value_sum, q_front, q_back, memory, values, scales, cells, positions < end,
            positions, SCALE, HEAD_DIM, VALUE_DIM, VALUES_OFFSET, VALUE_SCALES_OFFSET, KEY_SCALES, DTYPE, FRONT, BACK,
            VALUE_BLOCK, ACC_DTYPE, UPCAST, UNMASKED=True,
        )  # fmt: skip
    for tile in range(start, stop - (whole_until - whole_from)):
        tile += tl.where(tile >= whole_from, whole_until - whole_from, 0)  # skips the tiles of the first loop
        positions = tile * TILE + tl.arange(0, TILE)
        cells = cell_offsets(pages, window_pages, positions, end, PAGE_SIZE, CELL_SIZE, IS_WINDOW_POOL)
        if IS_PROMPT:
            visible = is_line[:, None] & (positions[None, :] <= last_visible[:, None])
            if HAS_LOWER_LIMIT:
                visible &= positions[None, :] >= first_visible[:, None]
        else:
            window_slot = positions - length  # the slot's number; below 0 for committed tokens, which are visible
            visible = is_line[:, None] & (window_slot < 0)[None, :]
            # The label of a window slot: length + the number of the row's ancestors in lower slots, counted below.
            labels = tl.zeros([LINES, TILE], tl.int32) + tl.minimum(positions, length)[None, :]
            for word in tl.static_range(MASK_WORDS):
                word_bits = tl.load(ancestors + line_rows * MASK_WORDS + word, mask=is_line, other=0)[:, None]
                index = window_slot - 32 * word
                in_word, bit_in_word = (index >= 0) & (index < 32) & (window_slot < width), index & 31
                visible |= in_word[None, :] & (((word_bits >> bit_in_word[None, :]) & 1) != 0)
                if HAS_LOWER_LIMIT:
                    # Ancestors in lower bits of this word.
                    lower_ancestors = popcount(word_bits & ((1 << bit_in_word[None, :]) - 1))
                    labels += tl.where(
                        in_word[None, :], lower_ancestors, tl.where((index >= 32)[None, :], popcount(word_bits), 0)
                    )
            if HAS_LOWER_LIMIT:
                visible &= labels >= first_visible[:, None]
        max_score, weight_sum, value_sum = add_tile(
            max_score, weight_sum, value_sum, q_front, q_back, memory, values, scales, cells, positions < end,
            visible, SCALE, HEAD_DIM, VALUE_DIM, VALUES_OFFSET, VALUE_SCALES_OFFSET, KEY_SCALES, DTYPE, FRONT, BACK,
            VALUE_BLOCK, ACC_DTYPE, UPCAST, UNMASKED=False,
        )  # fmt: skip
    value_offsets = tl.arange(0, VALUE_BLOCK)
    index = batch_rows * HEADS + line_heads
    value_mask = is_line[:, None] & (value_offsets < VALUE_DIM)[None, :]
    if SPLITS > 1 or SKIP_PREFIX:
        partial_offset = (index * SPLITS + split) * (VALUE_BLOCK + 2)
        tl.store(partials + partial_offset[:, None] + value_offsets[None, :], value_sum, mask=value_mask)
        tl.store(partials + partial_offset + VALUE_BLOCK, max_score, mask=is_line)
        tl.store(partials + partial_offset + VALUE_BLOCK + 1, weight_sum, mask=is_line)
    else:
        if HAS_SINKS:
            # One more logit in the softmax, without a value.
            sink = tl.load(sinks + line_heads, mask=is_line, other=0.0).to(ACC_DTYPE) * LOG2E
            new_max = tl.maximum(max_score, sink)
            rescale = tl.exp2(max_score - new_max)
            weight_sum = weight_sum * rescale + tl.exp2(sink - new_max)
            value_sum *= rescale[:, None]
        is_nonfinite = tl.load(nonfinite_rows + batch_rows, mask=is_line, other=0) != 0
        value_sum = value_sum / tl.where(weight_sum == 0, 1.0, weight_sum)[:, None]
        value_sum = tl.where(is_nonfinite[:, None], float("nan"), value_sum)
        tl.store(
            out + index[:, None] * VALUE_DIM + value_offsets[None, :],
            value_sum.to(out.dtype.element_ty),
            mask=value_mask,
        )
