"""Loading decoder layers from a checkpoint: their attention, norms and inputs. `load_mlp.py` loads their MLPs."""

from dataclasses import replace

import torch
from torch import Tensor

from cluster.arch import LayerGeometry, Moe
from cluster.arch.resolve import check_heads
from cluster.distributed.mesh import Shard
from cluster.kernels.interface import HeadNorms
from cluster.models.arithmetic import concat
from cluster.models.attention import LatentAttention, SelfAttention
from cluster.models.experts import RowNorm
from cluster.models.layer import DecoderLayer, ExpertsBesideMlp, LayerInput
from cluster.models.load_mlp import MlpLoader, activation_of
from cluster.models.rotary import half_split
from cluster.models.weights import permute_outputs


class Loader(MlpLoader):
    """Loads the parts of layers: of each tensor, only this rank's shard."""

    def attention(self, prefix: str, g: LayerGeometry, columns: int) -> SelfAttention:
        """Return the attention block under `prefix`, whose qkv projection has `columns` inputs."""
        shard, d, value_dim = self.sharding.attention, g.head_dim, g.value_dim
        local = local_heads(g, shard)
        q_span = (shard.rank * local.heads * d, (shard.rank + 1) * local.heads * d)
        # `q_proj` holds (query, gate) of each head if gated, so its spans are twice as wide.
        query_factor = 2 if g.gated else 1
        first_kv_head = shard.rank * g.kv_heads // shard.size
        k_span, v_span = ((first_kv_head * width, (first_kv_head + local.kv_heads) * width) for width in (d, value_dim))
        parts = [
            ("q", query_factor * g.heads * d, (query_factor * q_span[0], query_factor * q_span[1])),
            ("k", g.kv_heads * d, k_span),
            ("k" if g.keys_as_values else "v", g.kv_heads * value_dim, v_span),
        ]
        letters, num_outputs, spans = map(list, zip(*(parts if g.borrows is None else parts[:1]), strict=True))
        names = [f"{prefix}.{letter}_proj" for letter in letters]
        qkv, qkv_bias = self.column_parallel(names, num_outputs, spans, columns, g.attention_bias)
        if g.gated:
            qkv = permute_outputs(qkv, lambda index: gates_last(index, local.heads, d))
            qkv_bias = None if qkv_bias is None else gates_last(qkv_bias, local.heads, d)
        if g.interleaved:
            num_heads = local.heads + (local.kv_heads if g.borrows is None else 0)
            qkv = permute_outputs(qkv, lambda index: heads_half_split(index, num_heads, d))
            qkv_bias = None if qkv_bias is None else heads_half_split(qkv_bias, num_heads, d)
        out_span = (shard.rank * local.heads * value_dim, (shard.rank + 1) * local.heads * value_dim)
        out, out_bias = self.row_parallel(
            f"{prefix}.o_proj", g.hidden, g.heads * value_dim, out_span, g.out_bias, shard
        )
        head_span = (shard.rank * local.heads, (shard.rank + 1) * local.heads)
        if g.head_gate:
            qkv = self.concat_outputs([qkv, self.matrix(f"{prefix}.g_proj.weight", g.heads, columns, rows=head_span)])
            qkv_bias = None if qkv_bias is None else concat([qkv_bias, qkv_bias.new_zeros(local.heads)])
        norms = None
        if g.bare_qk_norm:
            ones = torch.ones(d, dtype=self.dtype, device=self.device)
            norms = HeadNorms(local.heads, ones, ones, g.eps)
        if g.qk_norm:
            normed_parts = "qk" if g.borrows is None else "qq"  # without keys, the second norm is not used
            q_norm, k_norm = (self.norm(f"{prefix}.{part}_norm.weight", d, g.unit_offset) for part in normed_parts)
            norms = HeadNorms(local.heads, q_norm, k_norm, g.eps)
        value_norm = None
        if g.value_norm:
            value_norm = RowNorm(self.kernels, torch.ones(value_dim, dtype=self.dtype, device=self.device), g.eps)
        sinks = self.tensor(f"{prefix}.sinks", g.heads, rows=head_span) if g.sinks else None
        return SelfAttention(
            kernels=self.kernels,
            qkv=self.weight(qkv),
            out=out,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            heads=local.heads,
            cell=local.cell,
            norms=norms,
            sinks=sinks,
            gated=g.gated or g.head_gate,
            value_scale=g.value_scale,
            value_norm=value_norm,
            borrows=g.borrows is not None,
            rotated=g.rotated,
        )

    def latent(self, prefix: str, g: LayerGeometry, columns: int) -> LatentAttention:
        """Return the latent attention block under `prefix`, with `columns` inputs. On disk, the rotated dimensions are
        neighbouring pairs; they are permuted to the half-split layout.
        """
        shard, sizes = self.sharding.attention, g.latent
        assert sizes is not None
        heads = local_heads(g, shard).heads
        first_head, width = shard.rank * heads, sizes.nope + sizes.rope
        q_span = (first_head * width, (first_head + heads) * width)
        q_down = q_norm = q_down_bias = None
        if sizes.q_rank is None:
            q_up = self.matrix(f"{prefix}.q_proj.weight", g.heads * width, columns, rows=q_span)
        else:
            q_down = self.projection(f"{prefix}.q_a_proj.weight", sizes.q_rank, columns)
            q_down_bias = self.tensor(f"{prefix}.q_a_proj.bias", sizes.q_rank) if g.attention_bias else None
            q_norm = self.norm(f"{prefix}.q_a_layernorm.weight", sizes.q_rank)
            q_up = self.matrix(f"{prefix}.q_b_proj.weight", g.heads * width, sizes.q_rank, rows=q_span)
        cell, name = sizes.kv_rank + sizes.rope, f"{prefix}.kv_a_proj_with_mqa"
        kv_down = permute_outputs(
            self.matrix(f"{name}.weight", cell, columns), lambda index: half_split(index, 1, sizes.rope)
        )
        kv_down_bias = half_split(self.tensor(f"{name}.bias", cell), 1, sizes.rope) if g.attention_bias else None
        # `kv_b_proj` holds (key, value) rows of each head; in absorbed form, attention uses keys and values separately.
        kv_width = sizes.nope + sizes.value
        kv_up = self.tensor(
            f"{prefix}.kv_b_proj.weight",
            g.heads * kv_width,
            sizes.kv_rank,
            rows=(first_head * kv_width, (first_head + heads) * kv_width),
        ).view(heads, kv_width, sizes.kv_rank)
        value_span = (first_head * sizes.value, (first_head + heads) * sizes.value)
        out, out_bias = self.row_parallel(
            f"{prefix}.o_proj", g.hidden, g.heads * sizes.value, value_span, g.out_bias, shard
        )
        return LatentAttention(
            kernels=self.kernels,
            q_down=q_down,
            q_down_bias=q_down_bias,
            q_norm=q_norm,
            q_up=self.weight(permute_outputs(q_up, lambda index: half_split(index, heads, sizes.rope))),
            kv_down=self.weight(kv_down),
            kv_down_bias=kv_down_bias,
            kv_norm=self.norm(f"{prefix}.kv_a_layernorm.weight", sizes.kv_rank),
            keys=kv_up[:, : sizes.nope].contiguous(),
            values=kv_up[:, sizes.nope :].transpose(1, 2).contiguous(),
            out=out,
            out_bias=out_bias,
            sizes=sizes,
            heads=heads,
        )

    def layer(self, prefix: str, g: LayerGeometry) -> DecoderLayer:
        """Return the decoder layer under `prefix`."""
        attention_prefix, mlp_prefix = f"{prefix}.self_attn", f"{prefix}.mlp"
        before_mlp = "before_mlp" if g.sandwich else "post_attention_layernorm"

        def norm_weight(name: str) -> Tensor:
            return self.norm(f"{prefix}.{name}.weight", g.hidden, g.unit_offset)

        mlp, beside = None, None
        if g.moe is not None and g.moe.beside_mlp:
            beside = self._experts_beside(prefix, g, g.moe)
        elif g.moe is not None:
            mlp = self.experts(mlp_prefix, g, g.moe)
        return DecoderLayer(
            kernels=self.kernels,
            input_norm=norm_weight("input_layernorm"),
            attention=(self.attention if g.latent is None else self.latent)(attention_prefix, g, g.hidden),
            post_norm=norm_weight(before_mlp),
            mlp=self.mlp(mlp_prefix, g) if mlp is None else mlp,
            eps=g.eps,
            after_attention=norm_weight("after_attention") if g.sandwich else None,
            after_mlp=norm_weight("after_mlp") if g.sandwich else None,
            beside=beside,
            layer_input=self._layer_input(f"{prefix}.layer_input", g) if g.layer_input else None,
            scale=self.tensor(f"{prefix}.output_scale", 1) if g.output_scale else None,
        )

    def _experts_beside(self, prefix: str, g: LayerGeometry, moe: Moe) -> ExpertsBesideMlp:
        """Return the experts beside the MLP of the layer under `prefix`."""
        before, after_mlp, after_experts = (
            self.norm(f"{prefix}.{name}.weight", g.hidden, g.unit_offset)
            for name in ("before_experts", "after_dense_mlp", "after_experts")
        )
        experts = self.experts(f"{prefix}.moe", g, moe, RowNorm(self.kernels, before, g.eps))
        return ExpertsBesideMlp(experts, after_mlp, after_experts)

    def _layer_input(self, prefix: str, g: LayerGeometry) -> LayerInput:
        """Return what adds a layer's own input to the residual stream."""
        return LayerInput(
            self.kernels,
            self.projection(f"{prefix}.gate.weight", g.layer_input, g.hidden),
            self.projection(f"{prefix}.projection.weight", g.hidden, g.layer_input),
            self.norm(f"{prefix}.norm.weight", g.hidden, g.unit_offset),
            g.eps,
            activation_of(g.activation, None),
        )


def gates_last(packed: Tensor, heads: int, d: int) -> Tensor:
    """Return `packed` `[.., 2 n d + more]` with the gates moved to the end of the last dimension. That dimension begins
    with the query (d numbers) and the gate (d numbers) of head 0, then those of head 1, and so on, for n = `heads`
    heads.
    """
    query_gate_pairs = packed[..., : 2 * heads * d].reshape(*packed.shape[:-1], heads, 2, d)
    return concat(
        [
            query_gate_pairs[..., 0, :].flatten(-2),
            packed[..., 2 * heads * d :],
            query_gate_pairs[..., 1, :].flatten(-2),
        ],
        -1,
    )


def heads_half_split(packed: Tensor, heads: int, d: int) -> Tensor:
    """Return `packed` `[heads d + more]` with its first `heads` heads of d numbers in the half-split layout of rope."""
    return concat([half_split(packed[: heads * d], heads), packed[heads * d :]])


def local_heads(g: LayerGeometry, shard: Shard) -> LayerGeometry:
    """Return the geometry of one attention shard. If there are fewer KV heads than ranks, several ranks have the same
    KV head.

    Raises:
        ConfigError: the heads cannot be divided among the ranks.
    """
    check_heads(g, shard.size)
    return replace(g, heads=g.heads // shard.size, kv_heads=max(1, g.kv_heads // shard.size))
