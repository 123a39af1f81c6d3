"""The merge of partial attention results, and the page lists that another library's attention reads.

A line is one query head of one row. A split is a part of the positions that a line sees.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cluster.kernels.attend.gpu import LOG2E


class JoinArguments(NamedTuple):
    """The arguments of the kernel `join`, in order, without its constants, which `launch` passes by name."""

    partials: Tensor | None
    nonfinite_rows: Tensor
    sinks: Tensor | None
    prefix_out: Tensor | None
    prefix_lse: Tensor | None
    prefix_lens: Tensor | None
    out: Tensor
    rows_per_request: int


@triton.jit(do_not_specialize=["rows_per_request"])
def join(
    partials,
    nonfinite_rows,
    sinks,
    prefix_out,
    prefix_lse,
    prefix_lens,
    out,
    rows_per_request,
    HAS_SINKS: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Merge the splits of each line into `out` `[T, HEADS, VALUE_DIM]`. For each split of a line, `partials`
    `[T, HEADS, SPLITS, VALUE_BLOCK + 2]` has the weighted sum of values, the highest score (times log2(e)) and the sum
    of weights. The kernel reads `SPLITS_AT_ONCE` splits at a time. `SPLITS` and `SPLITS_AT_ONCE` are powers of two;
    `SPLITS` is 0 if there are no partials.

    If `HAS_PREFIX`, also merge another library's attention of the first positions: `prefix_out` `[T, HEADS, VALUE_DIM]`
    and its log-sum-exps to base 2, `prefix_lse` `[T, HEADS]`. If `prefix_lens` `[R]` is given, do so only for requests
    whose number in `prefix_lens` is not 0; a request has `rows_per_request` rows. A row that is marked in
    `nonfinite_rows` becomes NaN.

    out = sum_i 2^(m_i - m) values_i / sum_i 2^(m_i - m) weights_i over the splits i, where m_i is the highest score of
    split i, weights_i its sum of weights, and m = max m_i. `prefix_out` is one more term, already normalised: m_i = lse
    and weights_i = 1. A sink adds 2^(sink - m) to the denominator.
    """
    row, head, value_offsets = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, VALUE_BLOCK)
    line = row * HEADS + head
    max_score, weight_sum, value_sum = (
        tl.full([], float("-inf"), ACC_DTYPE),
        tl.zeros([], ACC_DTYPE),
        tl.zeros([VALUE_BLOCK], ACC_DTYPE),
    )
    if SPLITS > 0:
        partial_starts = partials + (line * SPLITS + tl.arange(0, SPLITS)) * (VALUE_BLOCK + 2)
        max_score = tl.max(tl.load(partial_starts + VALUE_BLOCK), 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(ACC_DTYPE) * LOG2E
        max_score = tl.maximum(max_score, sink)
    if HAS_PREFIX:
        has_prefix = True
        if prefix_lens is not None:
            has_prefix = tl.load(prefix_lens + row // rows_per_request) > 0
        prefix_score = tl.where(has_prefix, tl.load(prefix_lse + line).to(ACC_DTYPE), float("-inf"))
        max_score = tl.maximum(max_score, prefix_score)
    max_score = tl.where(max_score == float("-inf"), 0.0, max_score)
    for begin in tl.static_range(0, SPLITS, SPLITS_AT_ONCE):
        partial_starts = partials + (line * SPLITS + begin + tl.arange(0, SPLITS_AT_ONCE)) * (VALUE_BLOCK + 2)
        rescale = tl.exp2(tl.load(partial_starts + VALUE_BLOCK) - max_score)
        weight_sum += tl.sum(tl.load(partial_starts + VALUE_BLOCK + 1) * rescale, 0)
        values = tl.load(
            partial_starts[:, None] + value_offsets[None, :], mask=(value_offsets < VALUE_DIM)[None, :], other=0.0
        )
        value_sum += tl.sum(values * rescale[:, None], 0)
    if HAS_PREFIX:
        rescale = tl.exp2(prefix_score - max_score)
        weight_sum += rescale
        value_sum += (
            tl.load(
                prefix_out + line * VALUE_DIM + value_offsets, mask=(value_offsets < VALUE_DIM) & has_prefix, other=0.0
            ).to(ACC_DTYPE)
            * rescale
        )
    if HAS_SINKS:
        weight_sum += tl.exp2(sink - max_score)
    value_sum = tl.where(
        tl.load(nonfinite_rows + row) != 0, float("nan"), value_sum / tl.where(weight_sum == 0, 1.0, weight_sum)
    )
    tl.store(out + line * VALUE_DIM + value_offsets, value_sum.to(out.dtype.element_ty), mask=value_offsets < VALUE_DIM)


class ListPagesArguments(NamedTuple):
    """The arguments of the kernel `list_pages`, in order, without its constants, which `launch` passes by name."""

    pages: Tensor
    table_rows: Tensor
    indptr: Tensor
    page_list: Tensor
    pages_per_request: int


@triton.jit(do_not_specialize=["pages_per_request"])
def list_pages(pages, table_rows, indptr, page_list, pages_per_request, BLOCK: tl.constexpr):
    """Copy the first `indptr[i + 1] - indptr[i]` pages of each request i to `page_list`, request after request. The
    pages of request i are row `table_rows[i]` of the page table `pages`, whose rows have `pages_per_request` pages.
    """
    request, offsets = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(indptr + request)
    mask = offsets < tl.load(indptr + request + 1) - begin
    row = tl.load(table_rows + request).to(tl.int64)
    tl.store(
        page_list + begin + offsets, tl.load(pages + row * pages_per_request + offsets, mask=mask, other=0), mask=mask
    )
