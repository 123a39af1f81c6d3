"""One tile of attention: where the cells of some positions are, how they are read, and what they add to a softmax."""

import triton
import triton.language as tl

from cluster.kernels.store.gpu import power_of_two


@triton.jit
def popcount(words):
    """Return the number of bits set in each 32-bit word, by sums of 2, 4 and 8 adjacent bits, then of four bytes."""
    x = words.to(tl.uint32, bitcast=True)
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def load_cells(
    memory,
    scales,
    cells,
    cell_mask,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    CELL_SIZE: tl.constexpr,
    SECOND_SCALE_FROM: tl.constexpr,
    SCALES: tl.constexpr,
    DTYPE: tl.constexpr,
    UNMASKED: tl.constexpr,
):
    """Return numbers `FIRST` to `FIRST + COUNT - 1` of the cells that begin at offsets `cells`, as `[cells, COUNT]`.

    A cell has `CELL_SIZE` numbers; beyond these the result is 0. If `UNMASKED`, all cells are read. If not, cells that
    the mask `cell_mask` excludes give 0. If `SCALES` is 0, numbers are returned as stored. If it is 1 or 2, they
    are FP8 codes, decoded to dtype `DTYPE`: with 1, all use the scale at `scales + cells`; with 2, numbers from
    `SECOND_SCALE_FROM` on use the next scale.
    """
    offsets = FIRST + tl.arange(0, COUNT)
    pointers = memory + cells[:, None] + offsets[None, :]
    if UNMASKED and FIRST + COUNT <= CELL_SIZE:
        numbers = tl.load(pointers)
    elif UNMASKED:
        numbers = tl.load(pointers, mask=(offsets < CELL_SIZE)[None, :], other=0)
    else:
        numbers = tl.load(pointers, mask=cell_mask[:, None] & (offsets < CELL_SIZE)[None, :], other=0)
    if SCALES > 0:
        scale = power_of_two(tl.load(scales + cells, mask=cell_mask, other=0))[:, None]
        if SCALES == 2:
            second_scale = power_of_two(tl.load(scales + cells + 1, mask=cell_mask, other=0))[:, None]
            scale = tl.where((offsets < SECOND_SCALE_FROM)[None, :], scale, second_scale)
        numbers = (numbers.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale).to(DTYPE)
    return numbers


@triton.jit
def cell_offsets(
    pages,
    window_pages,
    positions,
    end,
    PAGE_SIZE: tl.constexpr,
    CELL_SIZE: tl.constexpr,
    IS_WINDOW_POOL: tl.constexpr,
):
    """Return the offsets of the cells at `positions` of a request with `pages`: (page * PAGE_SIZE + position %
    PAGE_SIZE) * CELL_SIZE. From position `end` on, page is 0. If `IS_WINDOW_POOL`, `window_pages` maps each page to a
    page of the pool.
    """
    page = tl.load(pages + positions // PAGE_SIZE, mask=positions < end, other=0).to(tl.int64)
    if IS_WINDOW_POOL:
        page = tl.load(window_pages + page).to(tl.int64)
    return (page * PAGE_SIZE + positions % PAGE_SIZE) * CELL_SIZE


@triton.jit
def add_tile(
    max_score,
    weight_sum,
    value_sum,
    q_front,
    q_back,
    memory,
    values,
    scales,
    cells,
    cell_mask,
    visible,
    SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES_OFFSET: tl.constexpr,
    VALUE_SCALES_OFFSET: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    DTYPE: tl.constexpr,
    FRONT: tl.constexpr,
    BACK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
    UNMASKED: tl.constexpr,
):
    """Add one tile of cells to an online softmax; return the new `max_score`, `weight_sum` and `value_sum`. Lines see
    the cells in the mask `visible`; if `UNMASKED`, they see all cells.

    If m is the old and m' the new highest score, `weight_sum` becomes weight_sum * 2^(m - m') + sum of 2^(s - m') over
    the scores s of the tile. `value_sum` is computed in the same way, with each term times the cell's value.
    """
    # FP8: values have one scale, at `scales + VALUE_SCALES_OFFSET`. FRONT or BACK of a latent has one scale too, unless
    # the boundary `VALUE_DIM` between latent and rotated key is inside it.
    FP8_OF_VALUES: tl.constexpr = 1 if KEY_SCALES else 0
    FP8_OF_FRONT: tl.constexpr = 1 if KEY_SCALES == 2 and FRONT <= VALUE_DIM else KEY_SCALES
    FP8_OF_BACK: tl.constexpr = 1 if KEY_SCALES == 2 and FRONT >= VALUE_DIM else KEY_SCALES
    BACK_SCALE_OFFSET: tl.constexpr = 1 if FP8_OF_BACK < KEY_SCALES else 0
    key_front = load_cells(
        memory, scales, cells, cell_mask, 0, FRONT, HEAD_DIM, VALUE_DIM, FP8_OF_FRONT, DTYPE, UNMASKED
    )
    if VALUES_OFFSET == 0 and FRONT == VALUE_DIM:
        value = key_front  # a latent: its first `VALUE_DIM` numbers are the value
    else:
        value = load_cells(
            values,
            scales + VALUE_SCALES_OFFSET,
            cells,
            cell_mask,
            0,
            VALUE_BLOCK,
            VALUE_DIM,
            VALUE_DIM,
            FP8_OF_VALUES,
            DTYPE,
            UNMASKED,
        )
    if UPCAST:
        key_front, value = key_front.to(ACC_DTYPE), value.to(ACC_DTYPE)
    scores = tl.dot(q_front, tl.trans(key_front), input_precision="ieee", out_dtype=ACC_DTYPE)
    if BACK:
        key_back = load_cells(
            memory,
            scales + BACK_SCALE_OFFSET,
            cells,
            cell_mask,
            FRONT,
            BACK,
            HEAD_DIM,
            VALUE_DIM,
            FP8_OF_BACK,
            DTYPE,
            UNMASKED,
        )
        if UPCAST:
            key_back = key_back.to(ACC_DTYPE)
        scores = tl.dot(q_back, tl.trans(key_back), scores, input_precision="ieee", out_dtype=ACC_DTYPE)
    if not UNMASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(max_score, tl.max(scores, 1) * SCALE)
    # A line without any visible cell so far: -inf - (-inf) would be NaN.
    finite = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * SCALE - finite[:, None])
    rescale = tl.exp2(max_score - finite)
    weight_sum = weight_sum * rescale + tl.sum(weights, 1)
    value_sum = tl.dot(
        weights.to(value.dtype), value, value_sum * rescale[:, None], input_precision="ieee", out_dtype=ACC_DTYPE
    )
    return new_max, weight_sum, value_sum
