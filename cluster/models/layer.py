"""The decoder layer shared by Llama-like targets and drafts: packed qkv and gate-up weights, in-place rope.

Shape legend: T rows, H hidden, nh query heads, nkv kv heads, d head_dim, I intermediate.
A layer knows neither pages nor ranks: `Attend` is the one attention primitive, `TokenExchange` the one MLP seam.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.arch import LayerGeometry, Rope
from cluster.models.checkpoint import Checkpoint, placed


class Attend(Protocol):
    """Writes this layer's new k and v, then attends: q `[T, nh, d]`, kv `[T, 2, nkv, d]` -> `[T, nh * d]`."""

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Attend in `layer` of the runner's pool."""
        ...


class TokenExchange(Protocol):
    """How rows travel between data-parallel ranks around an MLP; with one rank it is the identity."""

    def gather(self, rows: Tensor) -> Tensor:
        """Own rows `[T, H]` -> the rows of every rank."""
        ...

    def scatter(self, rows: Tensor) -> Tensor:
        """Partial sums for the rows of every rank -> own rows `[T, H]`, summed."""
        ...


class NoExchange:
    """The exchange of a world of one."""

    def gather(self, rows: Tensor) -> Tensor:
        """Own rows, unchanged."""
        return rows

    def scatter(self, rows: Tensor) -> Tensor:
        """Own rows, unchanged."""
        return rows


class RotaryTable:
    """cos and signed sin per position, `[P, 1, d]`, in the half-split layout: out = x * cos + roll(x, d/2) * sin.

    llama3 scaling as in the Llama 3.1 release: long wavelengths are divided by `factor`, the band between the two
    frequency factors is blended.
    """

    def __init__(self, rope: Rope, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        inverse = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        if rope.llama3 is not None:
            factor, low, high, length = rope.llama3
            wavelength = 2 * math.pi / inverse
            blend = ((length / wavelength - low) / (high - low)).clamp(0, 1)
            inverse = (1 - blend) * inverse / factor + blend * inverse
        if dtype != torch.float64:
            inverse = inverse.float()
        angle = torch.arange(positions, dtype=inverse.dtype)[:, None] * inverse
        cos, sin = angle.cos(), angle.sin()
        self._cos = torch.cat([cos, cos], -1)[:, None].to(device, dtype)
        self._sin = torch.cat([-sin, sin], -1)[:, None].to(device, dtype)
        self._half = head_dim // 2

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin rows for `positions` `[T]`."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def apply_(self, heads: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        """Rotate `heads` `[T, n, d]` in place."""
        rolled = heads.roll(self._half, -1)
        heads.mul_(angles[0]).addcmul_(rolled, angles[1])


@dataclass(frozen=True, slots=True)
class Mlp:
    """Gated SiLU MLP with the gate and up weights packed, `[H, 2 I]`."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def __call__(self, rows: Tensor, exchange: TokenExchange) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        gate, up = project(exchange.gather(rows), self.gate_up, self.gate_up_bias).chunk(2, -1)
        return exchange.scatter(project(F.silu(gate).mul_(up), self.down, self.down_bias))


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Packed q, k, v projection, rope on q and k, the attention primitive, output projection."""

    qkv: Tensor
    out: Tensor
    qkv_bias: Tensor | None
    out_bias: Tensor | None
    heads: int
    kv_heads: int
    head_dim: int

    def __call__(
        self, rows: Tensor, rotary: RotaryTable, angles: tuple[Tensor, Tensor], attend: Attend, layer: int
    ) -> Tensor:
        """`[T, in]` -> `[T, H]`; `in` is H, or 2 H in the first layer of an EAGLE-3 draft."""
        count, rotated = rows.shape[0], self.heads + self.kv_heads
        packed = project(rows, self.qkv, self.qkv_bias).view(count, rotated + self.kv_heads, self.head_dim)
        rotary.apply_(packed[:, :rotated], angles)
        kv = packed[:, self.heads :].view(count, 2, self.kv_heads, self.head_dim)
        return project(attend(layer, packed[:, : self.heads], kv), self.out, self.out_bias)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm decoder layer on the un-split residual stream."""

    input_norm: Tensor
    attention: SelfAttention
    post_norm: Tensor
    mlp: Mlp
    eps: float

    def __call__(
        self,
        hidden: Tensor,
        rotary: RotaryTable,
        angles: tuple[Tensor, Tensor],
        attend: Attend,
        layer: int,
        exchange: TokenExchange,
    ) -> Tensor:
        """Residual stream entering the layer -> leaving it, `[T, H]`."""
        hidden = hidden + self.attention(norm(hidden, self.input_norm, self.eps), rotary, angles, attend, layer)
        return hidden + self.mlp(norm(hidden, self.post_norm, self.eps), exchange)


def project(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[T, in]` times weight `[in, out]` plus bias.

    Weights lie input-major: with the few rows of a decode or verify step a CPU multiplies them up to 1.7 times as fast
    as the output-major layout of checkpoints.
    """
    return torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)


def norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `[T, H]`."""
    return F.rms_norm(rows, weight.shape, weight, eps)


class Loader:
    """Takes named tensors of one checkpoint into the compute dtype and device."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device

    def take(self, name: str, *shape: int) -> Tensor:
        """One tensor, shape-checked."""
        return placed(self.checkpoint.take(name, shape), self.dtype, self.device)

    def projection(self, name: str, rows: int, columns: int) -> Tensor:
        """One weight of `rows` outputs, turned input-major: `[columns, rows]`."""
        return self.take(name, rows, columns).t().contiguous()

    def packed(self, names: list[str], rows: list[int], columns: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        """Several projections side by side, `[columns, sum(rows)]`, and their biases."""
        weights = [self.take(f"{name}.weight", r, columns) for name, r in zip(names, rows, strict=True)]
        weight = torch.cat(weights).t().contiguous()
        biases = [self.take(f"{name}.bias", r) for name, r in zip(names, rows, strict=True)] if bias else []
        return weight, torch.cat(biases) if bias else None

    def attention(self, prefix: str, g: LayerGeometry, columns: int) -> SelfAttention:
        """The attention block under `prefix`, its qkv reading `columns` inputs."""
        q_rows, kv_rows = g.heads * g.head_dim, g.kv_heads * g.head_dim
        names = [f"{prefix}.{p}_proj" for p in "qkv"]
        qkv, qkv_bias = self.packed(names, [q_rows, kv_rows, kv_rows], columns, g.attention_bias)
        out, out_bias = self.packed([f"{prefix}.o_proj"], [g.hidden], q_rows, g.attention_bias)
        return SelfAttention(qkv, out, qkv_bias, out_bias, g.heads, g.kv_heads, g.head_dim)

    def mlp(self, prefix: str, g: LayerGeometry) -> Mlp:
        """The gated MLP under `prefix`."""
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        gate_up, gate_up_bias = self.packed(names, [g.intermediate] * 2, g.hidden, g.mlp_bias)
        down, down_bias = self.packed([f"{prefix}.down_proj"], [g.hidden], g.intermediate, g.mlp_bias)
        return Mlp(gate_up, down, gate_up_bias, down_bias)

    def layer(self, prefix: str, g: LayerGeometry) -> DecoderLayer:
        """One whole decoder layer under `prefix`."""
        return DecoderLayer(
            input_norm=self.take(f"{prefix}.input_layernorm.weight", g.hidden),
            attention=self.attention(f"{prefix}.self_attn", g, g.hidden),
            post_norm=self.take(f"{prefix}.post_attention_layernorm.weight", g.hidden),
            mlp=self.mlp(f"{prefix}.mlp", g),
            eps=g.eps,
        )
