"""The decoder layer shared by Llama-like targets and drafts: packed qkv and gate-up weights, in-place rope.

Shape legend: T rows, H hidden, nh query heads, nkv kv heads, d head_dim, I intermediate.
A layer knows neither pages nor ranks: `Attend` is the one attention primitive, `TokenExchange` the one MLP seam.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.arch import LayerGeometry, Rope
from cluster.arch.split import check_heads
from cluster.mesh import Part
from cluster.models.checkpoint import Checkpoint, Span, placed


class Attend(Protocol):
    """Writes this layer's new k and v, then attends: q `[T, nh, d]`, kv `[T, 2, nkv, d]` -> `[T, nh * d]`."""

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Attend in `layer` of the runner's pool."""
        ...


class TokenExchange(Protocol):
    """How rows travel between ranks around the sharded parts of a model; with one rank it is the identity."""

    def reduce(self, rows: Tensor) -> Tensor:
        """Partial sums of own rows `[T, H]` over the attention group -> their sum."""
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """Own rows `[T, H]` -> the rows of every rank."""
        ...

    def scatter(self, rows: Tensor) -> Tensor:
        """Partial sums for the rows of every rank -> own rows `[T, H]`, summed."""
        ...

    def embed(self, ids: Tensor, lookup: Callable[[Tensor], Tensor]) -> Tensor:
        """Token ids `[T]` -> rows `[T, H]`, where `lookup` gives zeros for ids of another shard."""
        ...

    def head(self, rows: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows `[T, H]` -> logits of all shards `[T, n * v]`, where `project` gives this shard's `[T, v]`."""
        ...


LAYER_OPS = ("reduce", "gather", "scatter")
"""What a decoder layer calls of its exchange, in order."""


class NoExchange:
    """The exchange of a world of one, and of a draft that each rank runs whole."""

    def reduce(self, rows: Tensor) -> Tensor:
        """Own rows, unchanged."""
        return rows

    def gather(self, rows: Tensor) -> Tensor:
        """Own rows, unchanged."""
        return rows

    def scatter(self, rows: Tensor) -> Tensor:
        """Own rows, unchanged."""
        return rows

    def embed(self, ids: Tensor, lookup: Callable[[Tensor], Tensor]) -> Tensor:
        """The whole embedding's rows."""
        return lookup(ids)

    def head(self, rows: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        """The whole head's logits."""
        return project(rows)


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
    """Packed q, k, v projection, rope on q and k, the attention primitive, output projection; this rank's heads."""

    qkv: Tensor
    out: Tensor
    qkv_bias: Tensor | None
    out_bias: Tensor | None
    heads: int
    kv_heads: int
    head_dim: int

    def __call__(
        self,
        rows: Tensor,
        rotary: RotaryTable,
        angles: tuple[Tensor, Tensor],
        attend: Attend,
        layer: int,
        exchange: TokenExchange,
    ) -> Tensor:
        """`[T, in]` -> `[T, H]`; `in` is H, or 2 H in the first layer of an EAGLE-3 draft."""
        count, rotated = rows.shape[0], self.heads + self.kv_heads
        packed = project(rows, self.qkv, self.qkv_bias).view(count, rotated + self.kv_heads, self.head_dim)
        rotary.apply_(packed[:, :rotated], angles)
        kv = packed[:, self.heads :].view(count, 2, self.kv_heads, self.head_dim)
        return exchange.reduce(project(attend(layer, packed[:, : self.heads], kv), self.out, self.out_bias))


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
        normed = norm(hidden, self.input_norm, self.eps)
        hidden = hidden + self.attention(normed, rotary, angles, attend, layer, exchange)
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


class Sharding(NamedTuple):
    """Which part of a model this rank holds: of the attention heads, of the MLPs, of the vocabulary."""

    attention: Part = Part()
    mlp: Part = Part()
    vocab: Part = Part()


WHOLE = Sharding()


class Loader:
    """Takes named tensors of one checkpoint into the compute dtype and device, reading only this rank's shard."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, sharding: Sharding) -> None:
        self.checkpoint, self.dtype, self.device, self.sharding = checkpoint, dtype, device, sharding

    def take(self, name: str, *shape: int, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        """One tensor, shape-checked; of a shard only `rows` or `columns`."""
        return placed(self.checkpoint.take(name, shape, rows, columns), self.dtype, self.device)

    def projection(self, name: str, rows: int, columns: int) -> Tensor:
        """One weight of `rows` outputs, turned input-major: `[columns, rows]`."""
        return self.take(name, rows, columns).t().contiguous()

    def outputs(
        self, names: list[str], rows: list[int], spans: list[Span], columns: int, bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Projections side by side, each with the outputs of its span, `[columns, sum]`, and their biases."""
        each = list(zip(names, rows, spans, strict=True))
        weight = torch.cat([self.take(f"{name}.weight", r, columns, rows=span) for name, r, span in each])
        biases = [self.take(f"{name}.bias", r, rows=span) for name, r, span in each] if bias else []
        return weight.t().contiguous(), torch.cat(biases) if bias else None

    def inputs(
        self, name: str, rows: int, columns: int, span: Span, bias: bool, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """A projection that reads the inputs of its span, `[span, rows]`; part 0 alone brings the bias to the sum."""
        weight = self.take(f"{name}.weight", rows, columns, columns=span).t().contiguous()
        added = self.take(f"{name}.bias", rows) if bias else None
        return weight, added if part.rank == 0 else None

    def attention(self, prefix: str, g: LayerGeometry, columns: int) -> SelfAttention:
        """The attention block under `prefix`, its qkv reading `columns` inputs."""
        part, d = self.sharding.attention, g.head_dim
        local = local_heads(g, part)
        q = (part.rank * local.heads * d, (part.rank + 1) * local.heads * d)
        first = part.rank * g.kv_heads // part.size
        kv = (first * d, (first + local.kv_heads) * d)
        names = [f"{prefix}.{p}_proj" for p in "qkv"]
        rows = [g.heads * d, g.kv_heads * d, g.kv_heads * d]
        qkv, qkv_bias = self.outputs(names, rows, [q, kv, kv], columns, g.attention_bias)
        out, out_bias = self.inputs(f"{prefix}.o_proj", g.hidden, g.heads * d, q, g.attention_bias, part)
        return SelfAttention(qkv, out, qkv_bias, out_bias, local.heads, local.kv_heads, d)

    def mlp(self, prefix: str, g: LayerGeometry) -> Mlp:
        """The gated MLP under `prefix`."""
        part = self.sharding.mlp
        span = part.span(g.intermediate)
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        gate_up, gate_up_bias = self.outputs(names, [g.intermediate] * 2, [span] * 2, g.hidden, g.mlp_bias)
        down, down_bias = self.inputs(f"{prefix}.down_proj", g.hidden, g.intermediate, span, g.mlp_bias, part)
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


def local_heads(g: LayerGeometry, part: Part) -> LayerGeometry:
    """The geometry of one attention shard; KV heads are replicated where there are fewer than ranks.

    Raises:
        ConfigError: the heads cannot be split so.
    """
    check_heads(g, part.size)
    return replace(g, heads=g.heads // part.size, kv_heads=max(1, g.kv_heads // part.size))
