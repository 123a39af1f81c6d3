"""Attention blocks: grouped-query attention with packed projections, and latent attention (MLA) in its absorbed form.

Shape legend: T rows, H width of hidden states, nh query heads, nkv KV heads, d width of a query or key head, dv width
of a value head.

A block reads and writes the KV cache only through an `Attend`, and reaches other ranks only through a `TokenExchange`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cluster.arch import LatentSizes
from cluster.arch.cell import Cell
from cluster.arch.layer import QueryScaling
from cluster.kernels.interface import Angles, HeadNorms, Kernels, Weight
from cluster.models.exchange import TokenExchange
from cluster.models.experts import RowNorm


class Attend(Protocol):
    """Writes a layer's new cells to the pool, then attends: q `[T, nh, d]`, kv `[T, *Cell.shape]` -> `[T, nh * dv]`.

    A cell is k and v, or a latent (MLA), whose first dv numbers are the value. If `kv` is None, nothing is written: the
    layer borrows the cells of an earlier layer, which has written those of the same rows. `sinks` `[nh]` adds to the
    softmax of each head one logit that has no value; None adds none.
    """

    def __call__(self, layer: int, q: Tensor, kv: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        """Store `kv` in layer `layer` of the pool, and return the output of attention, one row for each row of `q`."""


class ScaledQueries:
    """An `Attend` that multiplies queries by a number that grows with their position, as `QueryScaling` says (Llama 4,
    Ministral 3).
    """

    def __init__(self, attend: Attend, positions: Tensor, scaling: QueryScaling) -> None:
        self._attend, self._layers = attend, scaling.layers
        steps = (positions + scaling.offset) // scaling.length
        self._query_scale = 1 + scaling.beta * torch.log1p(steps.double())

    def __call__(self, layer: int, q: Tensor, kv: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        """Scale the queries `q`, then attend."""
        if self._layers is not None and layer not in self._layers:
            return self._attend(layer, q, kv, sinks)
        return self._attend(layer, q * self._query_scale.to(q.dtype)[:, None, None], kv, sinks)


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """This rank's heads: packed q, k, v projection, rope on q and k, the attention primitive, output projection.

    `cell` is what the pool keeps of a token: the k and v of this rank's KV heads. `value_norm` norms v of each head,
    and `value_scale` multiplies v. If `gated`, the packed projection ends with gates, `[nh, dv]` or one per head
    `[nh, 1]`; their sigmoid multiplies the output of attention. If not `rotated`, there is no rope. If `borrows`, the
    projection has no k and v, and the layer reads those of an earlier layer.
    """

    kernels: Kernels
    qkv: Weight
    out: Weight
    qkv_bias: Tensor | None
    out_bias: Tensor | None
    heads: int
    cell: Cell
    norms: HeadNorms | None = None
    sinks: Tensor | None = None
    gated: bool = False
    value_scale: float = 1.0
    value_norm: RowNorm | None = None
    borrows: bool = False
    rotated: bool = True

    def __call__(self, rows: Tensor, angles: Angles, attend: Attend, layer: int, exchange: TokenExchange) -> Tensor:
        """Rows `[T, in]` -> `[T, H]`. `in` is H, or 2 H in a draft layer that also reads the embedding."""
        # The columns of a packed row: q, k, v, and gates if `gated`. A cell is k and v.
        num_rows, heads, cell = rows.shape[0], self.heads, self.cell
        rotated_heads = heads if self.borrows else heads + cell.kv_heads
        q_end, k_end = heads * cell.key_dim, rotated_heads * cell.key_dim
        v_end = q_end if self.borrows else q_end + cell.numbers
        packed = self.qkv(rows, self.qkv_bias)
        if self.rotated:
            self.kernels.rotate(packed[:, :k_end].view(num_rows, rotated_heads, cell.key_dim), angles, self.norms)
        if self.value_norm is not None and not self.borrows:
            values = packed[:, k_end:v_end]
            values.copy_(self.value_norm(values.reshape(-1, cell.value_dim)).view_as(values))
        if self.value_scale != 1:
            packed[:, k_end:v_end].mul_(self.value_scale)
        q = packed[:, :q_end].view(num_rows, heads, cell.key_dim)
        kv = None if self.borrows else packed[:, q_end:v_end].view(num_rows, *cell.shape)
        attended = attend(layer, q, kv) if self.sinks is None else attend(layer, q, kv, self.sinks)
        if self.gated:
            gates = packed[:, v_end:].reshape(num_rows, heads, (packed.shape[1] - v_end) // heads).sigmoid()
            attended = (attended.view(num_rows, heads, cell.value_dim) * gates).flatten(1)
        return exchange.reduce(self.out(attended, self.out_bias))


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention, absorbed (arXiv 2405.04434, 2.1.2): queries are projected into the latent space.

    The pool holds one cell per token, which all heads share: the normed latent and the rotated key. `keys`
    `[nh, nope, kv_rank]` and `values` `[nh, kv_rank, value]` are the two parts of `kv_b_proj`; `LatentSizes` explains
    these sizes. If `q_down` is None, queries have no low-rank projection.
    """

    kernels: Kernels
    q_down: Weight | None
    q_down_bias: Tensor | None
    q_norm: Tensor | None
    q_up: Weight
    kv_down: Weight
    kv_down_bias: Tensor | None
    kv_norm: Tensor
    keys: Tensor
    values: Tensor
    out: Weight
    out_bias: Tensor | None
    sizes: LatentSizes
    heads: int

    def __call__(self, rows: Tensor, angles: Angles, attend: Attend, layer: int, exchange: TokenExchange) -> Tensor:
        """Rows `[T, in]` -> `[T, H]`; `in` is as in `SelfAttention`."""
        num_rows, sizes, kernels = rows.shape[0], self.sizes, self.kernels
        queries = rows
        if self.q_down is not None and self.q_norm is not None:
            queries = kernels.norm(self.q_down(rows, self.q_down_bias), self.q_norm, sizes.eps)
        q = self.q_up(queries).view(num_rows, self.heads, sizes.nope + sizes.rope)
        latent = self.kv_down(rows, self.kv_down_bias)
        normed = kernels.norm(latent[:, : sizes.kv_rank], self.kv_norm, sizes.eps)
        cell = torch.cat([normed, latent[:, sizes.kv_rank :]], -1)
        cell = cell.view(num_rows, 1, 1, sizes.kv_rank + sizes.rope)
        kernels.rotate(cell[:, 0, :, sizes.kv_rank :], angles)
        kernels.rotate(q[..., sizes.nope :], angles)
        # q . (K c) = (q K) . c, so `keys` can multiply the queries instead of the cached latents c. In the same way,
        # `values` multiplies the output of attention. Attention itself reads the latents as they are.
        absorbed = torch.bmm(q[..., : sizes.nope].transpose(0, 1), self.keys).transpose(0, 1)
        attended = attend(layer, torch.cat([absorbed, q[..., sizes.nope :]], -1), cell)
        attended = torch.bmm(attended.view(num_rows, self.heads, sizes.kv_rank).transpose(0, 1), self.values)
        rows = attended.transpose(0, 1).reshape(num_rows, self.heads * sizes.value)
        return exchange.reduce(self.out(rows, self.out_bias))
