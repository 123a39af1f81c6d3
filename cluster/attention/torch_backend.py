"""The attention primitive in plain torch: the reference for all other backends, and the fallback without them.

A cell that a row may not see never affects the row, not even with NaN: memory of other requests is never read
(`RequestCells`), and k and v that are not finite never enter the pool (`kept_out`).
"""

from collections.abc import Sequence
from math import isfinite, nan, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.attention.cells import CellPiece
from cluster.attention.gather import AttentionCall, Gather, GatherSpec
from cluster.attention.shape import AttentionShape
from cluster.batch import AttentionMetadata, HostBounds
from cluster.capture.recorder import native, opaque
from cluster.kv.codes import coded, decoded, largest
from cluster.kv.pool import KVPool


def kept_out(q: Tensor, kv: Tensor, most: float | None = None) -> tuple[Tensor, Tensor]:
    """Return `q` and `kv` with bad cells replaced: a cell that is not finite, or has a magnitude above `most`, becomes
    zeros, and the query of its row becomes NaN.

    So the row that overflowed outputs NaN. Rows that mask its cell do not: if the cell held NaN, their weight of 0
    would give 0 * NaN = NaN. A tree node cannot spoil its siblings, nor a draft its later steps.
    """
    # A finite sum means that all numbers are finite. On a GPU this test would force a sync, so only a CPU makes it.
    if most is None and kv.is_cpu and isfinite(kv.sum().item()):
        return q, kv
    bad = ~(kv.isfinite() if most is None else kv.abs() <= most).flatten(1).all(1)
    return q.masked_fill(bad[:, None, None], nan), kv.masked_fill(bad[:, None, None, None], 0)


class TorchAttention:
    """Attention over one runner's pool, bound to pool and page table at construction: a batch never carries a pool."""

    def __init__(self, pool: KVPool, gather: Gather, shape: AttentionShape) -> None:
        """Bind to a pool. `gather` turns the page table of the rank into attention calls."""
        self._memory, self._gather = [pool.kv[at] for at in range(pool.layers)], gather
        self._coded, self._dtype = pool.coded, pool.dtype
        self._most = None if pool.coded is None else largest(pool.dtype)
        _, self._kv_heads, self._head_dim = pool.cell
        self._heads, self._windows, self._scale, self._value_dim = shape.filled(pool)
        self._repeat, cell = self._heads // self._kv_heads, prod(pool.cell) * pool.dtype.itemsize
        self._reader = GatherSpec(cell, self._repeat, pool.dtype, set(self._windows))
        self._write: Tensor | None = None
        self._parts: list[AttentionCall] = []

    def prepare(self, bounds: HostBounds) -> None:
        """Begin a step within these bounds."""
        self._gather.prepare(bounds)

    def bind(self, seen: AttentionMetadata) -> None:
        """Use `seen` for the calls of the next forward. What all layers share is computed once, here."""
        native(self._bind, seen)

    def __call__(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Write kv `[T, 2, nkv, d]` or `[T, 1, 1, d]` to the pool, then attend q `[T, nh, d]` -> `[T, nh * dv]`."""
        return opaque(self._attended, layer, q, kv, sinks)

    def _bind(self, seen: AttentionMetadata) -> None:
        self._write = seen.write
        self._parts = self._gather.parts(seen, self._reader)
        for part in self._parts:
            part.biases = {width: for_heads(part, bias, self._repeat) for width, bias in part.biases.items()}

    def _attended(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
        assert self._write is not None
        q, kv = kept_out(q, kv, self._most)
        self._memory[layer].index_copy_(0, self._write, kv if self._coded is None else coded(kv, self._coded))
        parts = [self._attend(layer, q, part, sinks) for part in self._parts]
        if not parts:
            return q.new_zeros(q.shape[0], self._heads * self._value_dim)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, layer: int, q: Tensor, part: AttentionCall, sinks: Tensor | None) -> Tensor:
        """Return the outputs of one call. The rep query heads of a KV head become rep * q rows of one matrix."""
        nkv, r, n, repeat = self._kv_heads, part.requests, part.q_rows, self._repeat
        cells = [self._cells(layer, piece, r) for piece in part.pieces]
        rows = q[part.rows].view(r, n, nkv, repeat, -1).permute(0, 2, 3, 1, 4).reshape(r, nkv, repeat * n, -1)
        bias = part.biases[self._windows[layer]]
        column = None if sinks is None else sink_column(sinks.view(nkv, repeat), rows)
        if len(cells) > 1:
            out = in_pieces(rows, cells, bias, self._scale, column)
        elif column is None:
            out = F.scaled_dot_product_attention(rows, *cells[0], attn_mask=bias, scale=self._scale)
        else:
            out = with_sinks(rows, cells[0], bias, self._scale, column)
        out = out.view(r, nkv, repeat, n, -1).permute(0, 3, 1, 2, 4).reshape(r * n, self._heads * self._value_dim)
        return out if part.back is None else out.index_select(0, part.back)

    def _cells(self, layer: int, piece: CellPiece, requests: int) -> tuple[Tensor, Tensor]:
        """Return the keys `[R, nkv, L, d]` and values `[R, nkv, L, dv]` of a piece."""
        memory, read = self._memory[layer], piece.read
        found = memory[read] if isinstance(read, slice) else memory.index_select(0, read)
        if self._coded is not None:
            found = decoded(found, self._coded, self._dtype)
        cells = found.view(requests, piece.length, *found.shape[1:]).permute(2, 0, 3, 1, 4)
        values = cells[-1]
        return cells[0], values if self._value_dim == self._head_dim else values[..., : self._value_dim]


def for_heads(part: AttentionCall, bias: Tensor | None, repeat: int) -> Tensor | None:
    """Extend `bias` `[R or 1, q, c]` to all L cells of `part` and to rep heads: `[R or 1, 1, rep * q or 1, L]`."""
    if bias is None:
        return None
    if (more := sum(piece.length for piece in part.pieces) - bias.shape[2]) != 0:
        bias = F.pad(bias, (more, 0))  # zeros for the cells before; a negative `more` cuts padding off the front
    return (bias if part.q_rows == 1 or repeat == 1 else torch.cat([bias] * repeat, 1))[:, None]


def sink_column(sinks: Tensor, q: Tensor) -> Tensor:
    """Expand the sink logits `[nkv, rep]` to a column `[R, nkv, rep * n, 1]` for rows of q `[R, nkv, rep * n, d]`."""
    column = sinks.repeat_interleave(q.shape[2] // sinks.shape[1], 1)[None, ..., None]
    return column.to(q.dtype).expand(q.shape[0], -1, -1, 1)


def with_sinks(q: Tensor, cells: tuple[Tensor, Tensor], bias: Tensor | None, scale: float, column: Tensor) -> Tensor:
    """Attention with sinks: the softmax of a head has one more logit, which has no value (gpt-oss; arXiv 2309.17453).

    q `[R, nkv, rep * n, d]`, k `[R, nkv, L, d]`, v `[R, nkv, L, dv]`, bias as returned by `for_heads`.
    """
    k, v = cells
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale)
    if bias is not None:
        scores += bias
    return torch.matmul(torch.cat([scores, column], -1).softmax(-1)[..., :-1], v)


def in_pieces(
    q: Tensor, cells: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None, scale: float, column: Tensor | None
) -> Tensor:
    """Attention over keys and values in several pieces, with a `column` of sink logits or None.

    It computes one softmax over all pieces without concatenating them. If m is the highest of all scores s, then
    out = sum_i exp(s_i - m) v_i / sum_i exp(s_i - m). A sink adds exp(sink - m) to the denominator only.
    """
    q = q * scale
    scores = [torch.matmul(q, k.transpose(-1, -2)) for k, _ in cells]
    if bias is not None:
        for part, own in zip(scores, torch.split(bias, [part.shape[3] for part in scores], -1), strict=True):
            part += own
    top = torch.cat([part.amax(-1, keepdim=True) for part in scores] + ([] if column is None else [column]), -1)
    top = top.amax(-1, keepdim=True)
    total = torch.zeros_like(top) if column is None else (column - top).exp_()
    out = q.new_zeros(*q.shape[:-1], cells[0][1].shape[-1])
    for part, (_, v) in zip(scores, cells, strict=True):
        part.sub_(top).exp_()
        total += part.sum(-1, keepdim=True)
        out += torch.matmul(part, v)
    return out.div_(total)
