"""The merge of partial attention results of one line, and the page lists that another library's attention reads."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cluster.kernels.attend.gpu import LOG2E


class JoinArguments(NamedTuple):
    """What `join` takes, in its order; its constants follow by name."""

    partials: Tensor | None
    bad: Tensor
    sinks: Tensor | None
    before: Tensor | None
    before_lse: Tensor | None
    until: Tensor | None
    out: Tensor
    each: int


@triton.jit(do_not_specialize=["each"])
def join(
    partials,
    bad,
    sinks,
    before,
    before_lse,
    until,
    out,
    each,
    SINKS: tl.constexpr,
    BEFORE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Merge the `partials` of each line `[T, HEADS, SPLITS, WIDTH + 2]` (values, highest score times log2(e), sum) into
    `out`, `AT_ONCE` splits at a time. `SPLITS` and `AT_ONCE` are powers of two, but `SPLITS` is 0 without partials.

    If `BEFORE`, also merge the attention of other positions: `before` `[T, HEADS, VALUE]` and its log-sum-exps to
    base 2, `before_lse` `[T, HEADS]`. If `until` is given, do so only for requests whose entry of `until` is not 0; a
    request has `each` rows.

    out = sum_i 2^(m_i - m) values_i / sum_i 2^(m_i - m) total_i over the parts i, with m = max m_i. For `before`,
    values are normalised: m_i = lse and total_i = 1. A sink adds 2^(sink - m) to the denominator.
    """
    row, head, deep = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    place = row * HEADS + head
    highest, total, sums = tl.full([], float("-inf"), WIDE), tl.zeros([], WIDE), tl.zeros([WIDTH], WIDE)
    if SPLITS > 0:
        parts = partials + (place * SPLITS + tl.arange(0, SPLITS)) * (WIDTH + 2)
        highest = tl.max(tl.load(parts + WIDTH), 0)
    if SINKS:
        sink = tl.load(sinks + head).to(WIDE) * LOG2E
        highest = tl.maximum(highest, sink)
    if BEFORE:
        counts = True
        if until is not None:
            counts = tl.load(until + row // each) > 0
        edge = tl.where(counts, tl.load(before_lse + place).to(WIDE), float("-inf"))
        highest = tl.maximum(highest, edge)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    for begin in tl.static_range(0, SPLITS, AT_ONCE):
        parts = partials + (place * SPLITS + begin + tl.arange(0, AT_ONCE)) * (WIDTH + 2)
        kept = tl.exp2(tl.load(parts + WIDTH) - highest)
        total += tl.sum(tl.load(parts + WIDTH + 1) * kept, 0)
        values = tl.load(parts[:, None] + deep[None, :], mask=(deep < VALUE)[None, :], other=0.0)
        sums += tl.sum(values * kept[:, None], 0)
    if BEFORE:
        kept = tl.exp2(edge - highest)
        total += kept
        sums += tl.load(before + place * VALUE + deep, mask=(deep < VALUE) & counts, other=0.0).to(WIDE) * kept
    if SINKS:
        total += tl.exp2(sink - highest)
    sums = tl.where(tl.load(bad + row) != 0, float("nan"), sums / tl.where(total == 0, 1.0, total))
    tl.store(out + place * VALUE + deep, sums.to(out.dtype.element_ty), mask=deep < VALUE)


class ListPagesArguments(NamedTuple):
    """What `list_pages` takes, in its order; its constants follow by name."""

    pages: Tensor
    rows: Tensor
    indptr: Tensor
    listed: Tensor
    pages_each: int


@triton.jit(do_not_specialize=["pages_each"])
def list_pages(pages, rows, indptr, listed, pages_each, BLOCK: tl.constexpr):
    """Copy the first `indptr[i + 1] - indptr[i]` pages of table row `rows[i]` to `listed`, request after request."""
    request, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(indptr + request)
    held = at < tl.load(indptr + request + 1) - begin
    row = tl.load(rows + request).to(tl.int64)
    tl.store(listed + begin + at, tl.load(pages + row * pages_each + at, mask=held, other=0), mask=held)
