"""Loading the parts of decoder layers from a checkpoint: attention, MLP, experts, norms."""

from dataclasses import replace

import torch
from torch import Tensor

from cluster.arch import LayerGeometry, Moe
from cluster.arch.resolve import check_heads
from cluster.distributed.mesh import Shard
from cluster.kernels.interface import Activation, HeadNorms, Stack
from cluster.models.arithmetic import joined
from cluster.models.attention import LatentAttention, SelfAttention
from cluster.models.checkpoint import Matrix
from cluster.models.experts import Experts, Gate, LocalExperts
from cluster.models.layer import DecoderLayer
from cluster.models.mlp import Mlp
from cluster.models.rotary import half_split
from cluster.models.weights import WeightLoader, apart, in_order


class Loader(WeightLoader):
    """Loads this rank's shard of the parts of layers."""

    def attention(self, prefix: str, g: LayerGeometry, columns: int) -> SelfAttention:
        """Return the attention block under `prefix`, whose qkv projection has `columns` inputs."""
        part, d = self.sharding.attention, g.head_dim
        local = local_heads(g, part)
        q = (part.rank * local.heads * d, (part.rank + 1) * local.heads * d)
        # `q_proj` holds (query, gate) of each head if gated, so its spans are twice as wide.
        wide = 2 if g.gated else 1
        first = part.rank * g.kv_heads // part.size
        kv = (first * d, (first + local.kv_heads) * d)
        names = [f"{prefix}.{p}_proj" for p in "qkv"]
        rows = [wide * g.heads * d, g.kv_heads * d, g.kv_heads * d]
        spans = [(wide * q[0], wide * q[1]), kv, kv]
        qkv, qkv_bias = self.outputs(names, rows, spans, columns, g.attention_bias)
        if g.gated:
            qkv = in_order(qkv, lambda order: gates_last(order, local.heads, d))
            qkv_bias = None if qkv_bias is None else gates_last(qkv_bias, local.heads, d)
        if g.interleaved:
            n = local.heads + local.kv_heads
            qkv = in_order(qkv, lambda order: joined([half_split(order[: n * d], n), order[n * d :]]))
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
        """Return the latent attention block under `prefix`, with `columns` inputs; rope is interleaved on disk."""
        part, sizes = self.sharding.attention, g.latent
        assert sizes is not None
        heads = local_heads(g, part).heads
        own, width = part.rank * heads, sizes.nope + sizes.rope
        span = (own * width, (own + heads) * width)
        q_down = q_norm = q_down_bias = None
        if sizes.q_rank is None:
            q_up = self.matrix(f"{prefix}.q_proj.weight", g.heads * width, columns, rows=span)
        else:
            q_down = self.projection(f"{prefix}.q_a_proj.weight", sizes.q_rank, columns)
            q_down_bias = self.take(f"{prefix}.q_a_proj.bias", sizes.q_rank) if g.attention_bias else None
            q_norm = self.norm(f"{prefix}.q_a_layernorm.weight", sizes.q_rank)
            q_up = self.matrix(f"{prefix}.q_b_proj.weight", g.heads * width, sizes.q_rank, rows=span)
        cell, name = sizes.kv_rank + sizes.rope, f"{prefix}.kv_a_proj_with_mqa"
        kv_down = in_order(self.matrix(f"{name}.weight", cell, columns), lambda order: half_split(order, 1, sizes.rope))
        kv_down_bias = half_split(self.take(f"{name}.bias", cell), 1, sizes.rope) if g.attention_bias else None
        # `kv_b_proj` holds (key, value) rows of each head; in absorbed form, attention uses keys and values separately.
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
            q_up=self.weight(in_order(q_up, lambda order: half_split(order, heads, sizes.rope))),
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

    def mlp(self, prefix: str, g: LayerGeometry, part: Shard | None = None) -> Mlp:
        """Return shard `part` of the gated MLP under `prefix`. If `part` is None, it is this rank's shard of MLPs."""
        part = self.sharding.mlp if part is None else part
        span = part.span(g.intermediate)
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        gate_up, gate_up_bias = self.outputs(names, [g.intermediate] * 2, [span] * 2, g.hidden, g.mlp_bias)
        down, down_bias = self.inputs(f"{prefix}.down_proj", g.hidden, g.intermediate, span, g.mlp_bias, part)
        return Mlp(self.kernels, self.weight(gate_up), down, gate_up_bias, down_bias, Activation(g.activation))

    def experts(self, prefix: str, g: LayerGeometry, moe: Moe) -> Experts:
        """Return this rank's experts under `prefix` (or its columns of them), with their gate and shared MLP."""
        start, stop = self.sharding.columns.span(moe.intermediate)
        here = range(*self.sharding.experts.span(moe.experts))
        biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if moe.stacked:
            gates_ups, downs, *added = self._stacked(f"{prefix}.experts", g, moe, here)
            biases = added[0], added[1]
        else:
            inner, outer = (moe.intermediate, g.hidden), (g.hidden, moe.intermediate)

            def name(e: int, part: str) -> str:
                return f"{prefix}.experts.{e}.{part}_proj.weight"

            def both(e: int) -> Matrix:
                return self.beneath([self.matrix(name(e, p), *inner, rows=(start, stop)) for p in ("gate", "up")])

            def down(e: int) -> Matrix:
                return self.matrix(name(e, "down"), *outer, columns=(start, stop))

            gates_ups, downs = self.stack(here, both), self.stack(here, down)
            # Experts of other ranks are checked by their headers, so that every tensor is accounted for.
            for e in set(range(moe.experts)) - set(here):
                for p, shape in (("gate", inner), ("up", inner), ("down", outer)):
                    self.checkpoint.elsewhere(name(e, p), shape)
        take = self.wide if moe.scoring == "sigmoid" else self.take
        gate = Gate(
            weight=self.weight(take(f"{prefix}.router.weight", moe.experts, g.hidden)),
            bias=take(f"{prefix}.router.bias", moe.experts) if moe.router_bias else None,
            correction=self.wide(f"{prefix}.router.correction", moe.experts) if moe.correction else None,
            moe=moe,
        )
        shared = None
        if moe.shared:
            wide = replace(g, intermediate=moe.shared, mlp_bias=False)
            shared = self.mlp(f"{prefix}.shared_experts", wide, self.sharding.shared)
        shared_gate = self.projection(f"{prefix}.shared_gate.weight", 1, g.hidden) if moe.shared_gate else None
        activation = Activation(g.activation) if moe.clamp is None else Activation("clamped", *moe.clamp)
        held = self._held(moe, here) if self.sharding.apart else None
        return Experts(self.kernels, gate, gates_ups, downs, *biases, shared, activation, shared_gate, held)

    def _held(self, moe: Moe, here: range) -> LocalExperts:
        """Return which experts this rank holds (`here`), and for every expert the shard that holds it."""
        size = self.sharding.experts.size
        parts = [part for part in range(size) for _ in range(*Shard(part, size).span(moe.experts))]
        return LocalExperts(here.start, len(here), torch.tensor(parts, device=self.device))

    def _stacked(
        self, prefix: str, g: LayerGeometry, moe: Moe, here: range
    ) -> tuple[Stack, Stack, Tensor, Tensor | None]:
        """Return the experts of gpt-oss: gates and ups, downs, and the biases of both. On disk, a tensor holds all
        experts, and gate and up columns alternate. Matrices in MXFP4 are output-major, others are not.
        """
        e, h, i = moe.experts, g.hidden, moe.intermediate
        span, own = self.sharding.columns.span(i), (here.start, here.stop)
        both = (2 * span[0], 2 * span[1])
        output_major = not self.checkpoint.holds(f"{prefix}.gate_up_proj")

        def gate_up(expert: int) -> Matrix:
            name = f"{prefix}.gate_up_proj"
            if output_major:
                return in_order(self.matrix(name, e, 2 * i, h, rows=both, expert=expert), apart)
            return in_order(self.take(name, e, h, 2 * i, columns=both, expert=expert).t(), apart)

        def down(expert: int) -> Matrix:
            name = f"{prefix}.down_proj"
            if output_major:
                return self.matrix(name, e, h, i, columns=span, expert=expert)
            return self.take(name, e, i, h, rows=span, expert=expert).t()

        gates_ups, downs = self.stack(here, gate_up), self.stack(here, down)
        bias = self.take(f"{prefix}.gate_up_proj_bias", e, 2 * i, rows=own, columns=both)
        added = self.take(f"{prefix}.down_proj_bias", e, h, rows=own)
        turned = joined([bias[:, 0::2], bias[:, 1::2]], 1)
        return gates_ups, downs, turned, added if self.sharding.columns.rank == 0 else None

    def layer(self, prefix: str, g: LayerGeometry) -> DecoderLayer:
        """Return the decoder layer under `prefix`."""
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
    """Move gates to the end of outputs `[.., 2 n d + more]` that begin with (query, gate) of each of n heads."""
    both = packed[..., : 2 * heads * d].reshape(*packed.shape[:-1], heads, 2, d)
    return joined([both[..., 0, :].flatten(-2), packed[..., 2 * heads * d :], both[..., 1, :].flatten(-2)], -1)


def local_heads(g: LayerGeometry, part: Shard) -> LayerGeometry:
    """Return the geometry of one attention shard. If there are fewer KV heads than ranks, KV heads are replicated.

    Raises:
        ConfigError: the heads cannot be divided among the ranks.
    """
    check_heads(g, part.size)
    return replace(g, heads=g.heads // part.size, kv_heads=max(1, g.kv_heads // part.size))
