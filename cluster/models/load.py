"""Layers from a checkpoint: every part read by slice, shape-checked, in the compute dtype on the device."""

from dataclasses import replace

import torch
from torch import Tensor

from cluster.arch import LayerGeometry, Moe
from cluster.arch.resolve import check_heads
from cluster.kernels.interface import Activation, HeadNorms, Weight
from cluster.mesh import Part
from cluster.models.arithmetic import joined
from cluster.models.checkpoint import Checkpoint, Span, placed
from cluster.models.context import ModelContext
from cluster.models.experts import Gate
from cluster.models.layer import DecoderLayer, Experts, LatentAttention, Mlp, SelfAttention
from cluster.models.rotary import half_split


class Loader:
    """Takes named tensors of one checkpoint into the compute dtype and device, reading only this rank's shard."""

    def __init__(self, checkpoint: Checkpoint, context: ModelContext) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, context.dtype, context.device
        self.sharding, self.kernels = context.sharding, context.kernels

    def take(
        self, name: str, *shape: int, rows: Span | None = None, columns: Span | None = None, expert: int | None = None
    ) -> Tensor:
        """One tensor, shape-checked; `rows`, `columns` and `expert` as in `Checkpoint.take`."""
        return placed(self.checkpoint.take(name, shape, rows, columns, expert), self.dtype, self.device)

    def wide(self, name: str, *shape: int) -> Tensor:
        """One tensor in at least float32, for what half precision would spoil."""
        wide = self.dtype if self.dtype == torch.float64 else torch.float32
        return placed(self.checkpoint.take(name, shape), wide, self.device)

    def norm(self, name: str, size: int, unit_offset: bool = False) -> Tensor:
        """A norm's weight; with `unit_offset` 1 + weight in at least float32, as half precision would round it away."""
        if not unit_offset:
            return self.take(name, size)
        weight = self.wide(name, size)
        return weight if weight.device.type == "meta" else 1 + weight  # see `joined`

    def weight(self, matrix: Tensor) -> Weight:
        """A weight from `matrix` `[outputs, inputs]`, the layout of checkpoints."""
        return self.kernels.weight(matrix.t().contiguous())

    def projection(self, name: str, rows: int, columns: int) -> Weight:
        """One weight of `rows` outputs and `columns` inputs."""
        return self.weight(self.take(name, rows, columns))

    def outputs(
        self, names: list[str], rows: list[int], spans: list[Span], columns: int, bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Column-parallel projections, packed: of each the outputs in its span, `[sum, columns]`, and their biases."""
        each = list(zip(names, rows, spans, strict=True))
        weight = joined([self.take(f"{name}.weight", r, columns, rows=span) for name, r, span in each])
        biases = [self.take(f"{name}.bias", r, rows=span) for name, r, span in each] if bias else []
        return weight, joined(biases) if bias else None

    def inputs(
        self, name: str, rows: int, columns: int, span: Span, bias: bool, part: Part
    ) -> tuple[Weight, Tensor | None]:
        """A row-parallel projection, of the inputs in `span`; only part 0 adds the bias."""
        weight = self.weight(self.take(f"{name}.weight", rows, columns, columns=span))
        added = self.take(f"{name}.bias", rows) if bias else None
        return weight, added if part.rank == 0 else None

    def attention(self, prefix: str, g: LayerGeometry, columns: int) -> SelfAttention:
        """The attention block under `prefix`, its qkv reading `columns` inputs."""
        part, d = self.sharding.attention, g.head_dim
        local = local_heads(g, part)
        q = (part.rank * local.heads * d, (part.rank + 1) * local.heads * d)
        wide = 2 if g.gated else 1
        first = part.rank * g.kv_heads // part.size
        kv = (first * d, (first + local.kv_heads) * d)
        names = [f"{prefix}.{p}_proj" for p in "qkv"]
        rows = [wide * g.heads * d, g.kv_heads * d, g.kv_heads * d]
        spans = [(wide * q[0], wide * q[1]), kv, kv]
        qkv, qkv_bias = self.outputs(names, rows, spans, columns, g.attention_bias)
        if g.gated:
            qkv = gates_last(qkv.t(), local.heads, d).t()
            qkv_bias = None if qkv_bias is None else gates_last(qkv_bias, local.heads, d)
        if g.interleaved:
            turned = (local.heads + local.kv_heads) * d
            qkv[:turned] = half_split(qkv[:turned].contiguous(), local.heads + local.kv_heads)
        out, out_bias = self.inputs(f"{prefix}.o_proj", g.hidden, g.heads * d, q, g.out_bias, part)
        own = (part.rank * local.heads, (part.rank + 1) * local.heads)
        norms = None
        if g.qk_norm:
            of_q, of_k = (self.norm(f"{prefix}.{p}_norm.weight", d, g.unit_offset) for p in "qk")
            norms = HeadNorms(local.heads, of_q, of_k, g.eps)
        sinks = self.take(f"{prefix}.sinks", g.heads, rows=own) if g.sinks else None
        return SelfAttention(
            kernels=self.kernels,
            qkv=self.weight(qkv),
            out=out,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            heads=local.heads,
            kv_heads=local.kv_heads,
            head_dim=d,
            norms=norms,
            sinks=sinks,
            gated=g.gated,
        )

    def latent(self, prefix: str, g: LayerGeometry, columns: int) -> LatentAttention:
        """The latent attention block under `prefix`, reading `columns` inputs; its rope is interleaved on disk."""
        part, sizes = self.sharding.attention, g.latent
        assert sizes is not None
        heads = local_heads(g, part).heads
        own, width = part.rank * heads, sizes.nope + sizes.rope
        span = (own * width, (own + heads) * width)
        q_down = q_norm = q_down_bias = None
        if sizes.q_rank is None:
            q_up = self.take(f"{prefix}.q_proj.weight", g.heads * width, columns, rows=span)
        else:
            q_down = self.projection(f"{prefix}.q_a_proj.weight", sizes.q_rank, columns)
            q_down_bias = self.take(f"{prefix}.q_a_proj.bias", sizes.q_rank) if g.attention_bias else None
            q_norm = self.norm(f"{prefix}.q_a_layernorm.weight", sizes.q_rank)
            q_up = self.take(f"{prefix}.q_b_proj.weight", g.heads * width, sizes.q_rank, rows=span)
        cell, name = sizes.kv_rank + sizes.rope, f"{prefix}.kv_a_proj_with_mqa"
        kv_down = half_split(self.take(f"{name}.weight", cell, columns), 1, sizes.rope)
        kv_down_bias = half_split(self.take(f"{name}.bias", cell), 1, sizes.rope) if g.attention_bias else None
        both = sizes.nope + sizes.value
        up = self.take(
            f"{prefix}.kv_b_proj.weight", g.heads * both, sizes.kv_rank, rows=(own * both, (own + heads) * both)
        ).view(heads, both, sizes.kv_rank)
        inputs = (own * sizes.value, (own + heads) * sizes.value)
        out, out_bias = self.inputs(f"{prefix}.o_proj", g.hidden, g.heads * sizes.value, inputs, g.out_bias, part)
        return LatentAttention(
            kernels=self.kernels,
            q_down=q_down,
            q_down_bias=q_down_bias,
            q_norm=q_norm,
            q_up=self.weight(half_split(q_up, heads, sizes.rope)),
            kv_down=self.weight(kv_down),
            kv_down_bias=kv_down_bias,
            kv_norm=self.norm(f"{prefix}.kv_a_layernorm.weight", sizes.kv_rank),
            keys=up[:, : sizes.nope].contiguous(),
            values=up[:, sizes.nope :].transpose(1, 2).contiguous(),
            out=out,
            out_bias=out_bias,
            sizes=sizes,
            heads=heads,
        )

    def mlp(self, prefix: str, g: LayerGeometry) -> Mlp:
        """The gated MLP under `prefix`."""
        part = self.sharding.mlp
        span = part.span(g.intermediate)
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        gate_up, gate_up_bias = self.outputs(names, [g.intermediate] * 2, [span] * 2, g.hidden, g.mlp_bias)
        down, down_bias = self.inputs(f"{prefix}.down_proj", g.hidden, g.intermediate, span, g.mlp_bias, part)
        return Mlp(self.kernels, self.weight(gate_up), down, gate_up_bias, down_bias, Activation(g.activation))

    def experts(self, prefix: str, g: LayerGeometry, moe: Moe) -> Experts:
        """The experts under `prefix`, each sharded by columns, with their gate and the MLP that every token takes."""
        part = self.sharding.mlp
        start, stop = part.span(moe.intermediate)
        own = stop - start
        gate_up = torch.empty(moe.experts, g.hidden, 2 * own, dtype=self.dtype, device=self.device)
        down = torch.empty(moe.experts, own, g.hidden, dtype=self.dtype, device=self.device)
        biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if moe.stacked:
            biases = self._stacked(f"{prefix}.experts", g, moe, gate_up, down)
        else:
            for e in range(moe.experts):
                for i, name in enumerate(("gate", "up")):
                    whole = f"{prefix}.experts.{e}.{name}_proj.weight"
                    rows = self.take(whole, moe.intermediate, g.hidden, rows=(start, stop))
                    gate_up[e, :, i * own : (i + 1) * own] = rows.t()
                name = f"{prefix}.experts.{e}.down_proj.weight"
                down[e] = self.take(name, g.hidden, moe.intermediate, columns=(start, stop)).t()
        weight = self.wide if moe.scoring == "sigmoid" else self.take
        gate = Gate(
            weight=self.weight(weight(f"{prefix}.router.weight", moe.experts, g.hidden)),
            bias=self.take(f"{prefix}.router.bias", moe.experts) if moe.router_bias else None,
            correction=self.wide(f"{prefix}.router.correction", moe.experts) if moe.correction else None,
            moe=moe,
        )
        shared = None
        if moe.shared:
            shared = self.mlp(f"{prefix}.shared_experts", replace(g, intermediate=moe.shared, mlp_bias=False))
        shared_gate = self.projection(f"{prefix}.shared_gate.weight", 1, g.hidden) if moe.shared_gate else None
        gates_ups, downs = self.kernels.stack(gate_up), self.kernels.stack(down)
        activation = Activation(g.activation) if moe.clamp is None else Activation("clamped", *moe.clamp)
        return Experts(self.kernels, gate, gates_ups, downs, *biases, shared, activation, shared_gate)

    def _stacked(
        self, prefix: str, g: LayerGeometry, moe: Moe, gate_up: Tensor, down: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """gpt-oss's experts, all in one tensor with alternating gate and up columns; only MXFP4 is output-major."""
        e, h, i = moe.experts, g.hidden, moe.intermediate
        span = self.sharding.mlp.span(i)
        both = (2 * span[0], 2 * span[1])
        packed = not self.checkpoint.holds(f"{prefix}.gate_up_proj")
        for at in range(e):
            if packed:
                first = self.take(f"{prefix}.gate_up_proj", e, 2 * i, h, rows=both, expert=at).t()
                last = self.take(f"{prefix}.down_proj", e, h, i, columns=span, expert=at).t()
            else:
                first = self.take(f"{prefix}.gate_up_proj", e, h, 2 * i, columns=both, expert=at)
                last = self.take(f"{prefix}.down_proj", e, i, h, rows=span, expert=at)
            gate_up[at] = joined([first[:, 0::2], first[:, 1::2]], 1)
            down[at] = last
        bias = self.take(f"{prefix}.gate_up_proj_bias", e, 2 * i)[:, slice(*both)]
        added = self.take(f"{prefix}.down_proj_bias", e, h)
        turned = joined([bias[:, 0::2], bias[:, 1::2]], 1)
        return turned, added if self.sharding.mlp.rank == 0 else None

    def layer(self, prefix: str, g: LayerGeometry) -> DecoderLayer:
        """One whole decoder layer under `prefix`."""
        block, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        before_mlp = "before_mlp" if g.sandwich else "post_attention_layernorm"

        def scale(name: str) -> Tensor:
            return self.norm(f"{prefix}.{name}.weight", g.hidden, g.unit_offset)

        return DecoderLayer(
            kernels=self.kernels,
            input_norm=scale("input_layernorm"),
            attention=(self.attention if g.latent is None else self.latent)(block, g, g.hidden),
            post_norm=scale(before_mlp),
            mlp=self.mlp(mlp, g) if g.moe is None else self.experts(mlp, g, g.moe),
            eps=g.eps,
            after_attention=scale("after_attention") if g.sandwich else None,
            after_mlp=scale("after_mlp") if g.sandwich else None,
        )


def gates_last(packed: Tensor, heads: int, d: int) -> Tensor:
    """Move gates to the end of outputs `[.., 2 n d + more]` that begin with (query, gate) of each head."""
    both = packed[..., : 2 * heads * d].reshape(*packed.shape[:-1], heads, 2, d)
    return joined([both[..., 0, :].flatten(-2), packed[..., 2 * heads * d :], both[..., 1, :].flatten(-2)], -1)


def local_heads(g: LayerGeometry, part: Part) -> LayerGeometry:
    """The geometry of one attention shard; fewer KV heads than ranks are replicated.

    Raises:
        ConfigError: the heads cannot be divided among the ranks.
    """
    check_heads(g, part.size)
    return replace(g, heads=g.heads // part.size, kv_heads=max(1, g.kv_heads // part.size))
