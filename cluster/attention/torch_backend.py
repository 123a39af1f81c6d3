"""The attention primitive in plain torch: the reference for all other backends, and the backend where no other runs.

A cell (the k and v of one token) that a row may not see never affects the row, not even with NaN: memory of other
requests is never read (`RequestCells`), and k and v that are not finite never enter the pool (`mask_bad_cells`).
"""

from collections.abc import Sequence
from math import isfinite, nan

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.attention.cells import CellPiece
from cluster.attention.gather import AttentionCall, Gather, GatherSpec
from cluster.attention.shape import AttentionShape
from cluster.batch import AttentionMetadata, HostBounds
from cluster.capture.recorder import native, opaque
from cluster.kv.codes import decode, encode, max_magnitude
from cluster.kv.pool import KVPool


def mask_bad_cells(q: Tensor, kv: Tensor, max_abs: float | None = None) -> tuple[Tensor, Tensor]:
    """Return `q` and `kv` with bad cells replaced. A cell with a number that is not finite, or whose magnitude is above
    `max_abs` (None: no such limit), becomes zeros, and the query of its row becomes NaN.

    The row of a bad cell then outputs NaN, but rows that may not see this cell do not. If the cell held NaN, they
    would, because their weight of 0 would give 0 * NaN = NaN. So a tree node cannot spoil its siblings, and a draft
    cannot spoil later steps.
    """
    # A finite sum means that all numbers are finite. On a GPU this test would force a sync, so only a CPU makes it.
    if max_abs is None and kv.is_cpu and isfinite(kv.sum().item()):
        return q, kv
    is_bad_cell = ~(kv.isfinite() if max_abs is None else kv.abs() <= max_abs).flatten(1).all(1)
    return q.masked_fill(is_bad_cell[:, None, None], nan), kv.masked_fill(is_bad_cell[:, None, None, None], 0)


class TorchAttention:
    """Attention of the layers in one KV pool. Pool and page table are given at construction, never with a batch."""

    def __init__(self, pool: KVPool, gather: Gather, shape: AttentionShape) -> None:
        """Bind to a pool. `gather` makes the attention calls from the page table of the rank; `shape` is the shape of
        the model's attention.
        """
        self._layers, self._gather = [pool.kv[layer] for layer in range(pool.layers)], gather
        self._cell, self._dtype, self._fp8 = pool.cell, pool.dtype, pool.fp8
        self._max_abs = max_magnitude(pool.dtype) if pool.fp8 else None
        self._heads, self._windows, self._scale = shape.with_defaults(pool)
        self._heads_per_kv_head = self._heads // self._cell.kv_heads
        cell_bytes = self._cell.numbers * pool.dtype.itemsize
        self._spec = GatherSpec(cell_bytes, self._heads_per_kv_head, pool.dtype, set(self._windows))
        self._pool = pool
        self._write: Tensor | None = None
        self._calls: list[AttentionCall] = []

    def prepare(self, bounds: HostBounds) -> None:
        """Begin a step within `bounds`."""
        self._gather.prepare(bounds)

    def bind(self, metadata: AttentionMetadata) -> None:
        """Use `metadata` for the attention calls of the next forward. What all layers share is computed here, once."""
        native(self._bind, metadata)

    def __call__(self, layer: int, q: Tensor, kv: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        """Write kv `[T, *Cell.shape]` to the pool, unless it is None. Then compute the attention of the queries q
        `[T, nh, d]`, and return the result `[T, nh * dv]`.
        """
        return opaque(self._attend_all, layer, q, kv, sinks)

    def _bind(self, metadata: AttentionMetadata) -> None:
        self._write = self._pool.own_slots(metadata.write)
        self._calls = self._gather.calls(metadata, self._spec)
        for call in self._calls:
            call.biases = {
                sliding_window: expand_bias(call, bias, self._heads_per_kv_head)
                for sliding_window, bias in call.biases.items()
            }

    def _attend_all(self, layer: int, q: Tensor, kv: Tensor | None, sinks: Tensor | None) -> Tensor:
        assert self._write is not None
        if kv is not None:
            q, kv = mask_bad_cells(q, kv, self._max_abs)
            self._layers[layer].index_copy_(0, self._write, encode(kv, self._cell) if self._fp8 else kv)
        outputs = [self._attend(layer, q, call, sinks) for call in self._calls]
        if not outputs:
            return q.new_zeros(q.shape[0], self._heads * self._cell.value_dim)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, layer: int, q: Tensor, call: AttentionCall, sinks: Tensor | None) -> Tensor:
        """Return the output of one call, `[rows, nh * dv]`. The query heads of a KV head are joined: their
        heads_per_kv_head * q_rows rows form one matrix.
        """
        nkv, requests, q_rows = self._cell.kv_heads, call.requests, call.q_rows
        heads_per_kv_head = self._heads_per_kv_head
        keys_values = [self._cells(layer, piece, requests) for piece in call.pieces]
        queries = (
            q[call.rows]
            .view(requests, q_rows, nkv, heads_per_kv_head, -1)
            .permute(0, 2, 3, 1, 4)
            .reshape(requests, nkv, heads_per_kv_head * q_rows, -1)
        )
        bias = call.biases[self._windows[layer]]
        sink_logits = None if sinks is None else expand_sinks(sinks.view(nkv, heads_per_kv_head), queries)
        if len(keys_values) > 1:
            out = attend_pieces(queries, keys_values, bias, self._scale, sink_logits)
        elif sink_logits is None:
            out = F.scaled_dot_product_attention(queries, *keys_values[0], attn_mask=bias, scale=self._scale)
        else:
            out = attend_with_sinks(queries, keys_values[0], bias, self._scale, sink_logits)
        out = (
            out.view(requests, nkv, heads_per_kv_head, q_rows, -1)
            .permute(0, 3, 1, 2, 4)
            .reshape(requests * q_rows, self._heads * self._cell.value_dim)
        )
        return out if call.unpad_index is None else out.index_select(0, call.unpad_index)

    def _cells(self, layer: int, piece: CellPiece, requests: int) -> tuple[Tensor, Tensor]:
        """Return the keys `[R, nkv, L, d]` and values `[R, nkv, L, dv]` of a piece."""
        layer_cells, slots = self._layers[layer], piece.slots
        cells_read = layer_cells[slots] if isinstance(slots, slice) else layer_cells.index_select(0, slots)
        cell = self._cell
        if self._fp8:
            cells_read = decode(cells_read, cell, self._dtype)
        numbers, rows = cells_read.view(requests, piece.length, cell.numbers), (requests, piece.length, cell.kv_heads)
        keys = numbers[..., : cell.kv_heads * cell.key_dim].view(*rows, cell.key_dim)
        values = numbers[..., cell.values_offset :][..., : cell.kv_heads * cell.value_dim].view(*rows, cell.value_dim)
        return keys.transpose(1, 2), values.transpose(1, 2)


def expand_bias(call: AttentionCall, bias: Tensor | None, heads_per_kv_head: int) -> Tensor | None:
    """Extend `bias` `[R or 1, q, c]` to all L cells of `call` and to the rep = `heads_per_kv_head` query heads of a KV
    head. Return `[R or 1, 1, rep * q, L]`, or `[R or 1, 1, 1, L]` if q is 1, as all heads then share one row. Return
    None if `bias` is None.
    """
    if bias is None:
        return None
    if (missing_columns := sum(piece.length for piece in call.pieces) - bias.shape[2]) != 0:
        bias = F.pad(
            bias, (missing_columns, 0)
        )  # zeros for the cells before; a negative `missing_columns` cuts padding off the front
    return (bias if call.q_rows == 1 or heads_per_kv_head == 1 else torch.cat([bias] * heads_per_kv_head, 1))[:, None]


def expand_sinks(sinks: Tensor, queries: Tensor) -> Tensor:
    """Return the sink logits `[nkv, rep]` as a column `[R, nkv, rep * n, 1]`, one for each row of the `queries`
    `[R, nkv, rep * n, d]`.
    """
    column = sinks.repeat_interleave(queries.shape[2] // sinks.shape[1], 1)[None, ..., None]
    return column.to(queries.dtype).expand(queries.shape[0], -1, -1, 1)


def attend_with_sinks(
    q: Tensor, cells: tuple[Tensor, Tensor], bias: Tensor | None, scale: float, sink_logits: Tensor
) -> Tensor:
    """Return attention with sinks: the softmax of a head has one more logit, which has no value (gpt-oss; arXiv
    2309.17453).

    q is `[R, nkv, rep * n, d]`. `cells` are k `[R, nkv, L, d]` and v `[R, nkv, L, dv]`. `bias` and `sink_logits` are as
    returned by `expand_bias` and `expand_sinks`. The result is `[R, nkv, rep * n, dv]`.
    """
    k, v = cells
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale)
    if bias is not None:
        scores += bias
    return torch.matmul(torch.cat([scores, sink_logits], -1).softmax(-1)[..., :-1], v)


def attend_pieces(
    q: Tensor, cells: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None, scale: float, sink_logits: Tensor | None
) -> Tensor:
    """Return the attention of q `[R, nkv, rep * n, d]` over keys and values that are in several pieces, as
    `[R, nkv, rep * n, dv]`. `bias` and `sink_logits` are as returned by `expand_bias` and `expand_sinks`; either may be
    None.

    There is one softmax over all pieces, which are not concatenated. If m is the highest of all scores s, then
    out = sum_i exp(s_i - m) v_i / sum_i exp(s_i - m). A sink adds exp(sink - m) to the denominator only.
    """
    q = q * scale
    scores = [torch.matmul(q, k.transpose(-1, -2)) for k, _ in cells]
    if bias is not None:
        for piece_scores, piece_bias in zip(
            scores, torch.split(bias, [piece_scores.shape[3] for piece_scores in scores], -1), strict=True
        ):
            piece_scores += piece_bias
    max_score = torch.cat(
        [piece_scores.amax(-1, keepdim=True) for piece_scores in scores]
        + ([] if sink_logits is None else [sink_logits]),
        -1,
    )
    max_score = max_score.amax(-1, keepdim=True)
    weight_sum = torch.zeros_like(max_score) if sink_logits is None else (sink_logits - max_score).exp_()
    out = q.new_zeros(*q.shape[:-1], cells[0][1].shape[-1])
    for piece_scores, (_, v) in zip(scores, cells, strict=True):
        piece_scores.sub_(max_score).exp_()
        weight_sum += piece_scores.sum(-1, keepdim=True)
        out += torch.matmul(piece_scores, v)
    return out.div_(weight_sum)
