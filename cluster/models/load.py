"""Loading the parts of decoder layers from a checkpoint: attention, MLP, experts, norms."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from cluster.arch import LayerGeometry, Moe
from cluster.arch.resolve import check_heads
from cluster.distributed.mesh import Shard
from cluster.kernels.interface import Activation, HeadNorms, Stack
from cluster.models.arithmetic import concat
from cluster.models.attention import LatentAttention, SelfAttention
from cluster.models.checkpoint import CheckpointMatrix
from cluster.models.experts import Experts, Gate, LocalExperts
from cluster.models.layer import DecoderLayer
from cluster.models.mlp import Mlp
from cluster.models.rotary import half_split
from cluster.models.weights import WeightLoader, permute_outputs, split_alternating


class Loader(WeightLoader):
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
        names = [f"{prefix}.{letter}_proj" for letter in "qkv"]
        num_outputs = [query_factor * g.heads * d, g.kv_heads * d, g.kv_heads * value_dim]
        spans = [(query_factor * q_span[0], query_factor * q_span[1]), k_span, v_span]
        qkv, qkv_bias = self.column_parallel(names, num_outputs, spans, columns, g.attention_bias)
        if g.gated:
            qkv = permute_outputs(qkv, lambda index: gates_last(index, local.heads, d))
            qkv_bias = None if qkv_bias is None else gates_last(qkv_bias, local.heads, d)
        if g.interleaved:
            num_heads = local.heads + local.kv_heads
            qkv = permute_outputs(
                qkv, lambda index: concat([half_split(index[: num_heads * d], num_heads), index[num_heads * d :]])
            )
        out_span = (shard.rank * local.heads * value_dim, (shard.rank + 1) * local.heads * value_dim)
        out, out_bias = self.row_parallel(
            f"{prefix}.o_proj", g.hidden, g.heads * value_dim, out_span, g.out_bias, shard
        )
        head_span = (shard.rank * local.heads, (shard.rank + 1) * local.heads)
        if g.head_gate:
            qkv = self.concat_outputs([qkv, self.matrix(f"{prefix}.g_proj.weight", g.heads, columns, rows=head_span)])
            qkv_bias = None if qkv_bias is None else concat([qkv_bias, qkv_bias.new_zeros(local.heads)])
        norms = None
        if g.qk_norm:
            q_norm, k_norm = (self.norm(f"{prefix}.{letter}_norm.weight", d, g.unit_offset) for letter in "qk")
            norms = HeadNorms(local.heads, q_norm, k_norm, g.eps)
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

    def mlp(self, prefix: str, g: LayerGeometry, shard: Shard | None = None) -> Mlp:
        """Return shard `shard` (None: this rank's shard of MLPs) of the gated MLP under `prefix`."""
        shard = self.sharding.mlp if shard is None else shard
        span = shard.span(g.intermediate)
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        gate_up, gate_up_bias = self.column_parallel(names, [g.intermediate] * 2, [span] * 2, g.hidden, g.mlp_bias)
        down, down_bias = self.row_parallel(f"{prefix}.down_proj", g.hidden, g.intermediate, span, g.mlp_bias, shard)
        return Mlp(
            self.kernels, self.weight(gate_up), down, gate_up_bias, down_bias, activation_of(g.activation, g.limit)
        )

    def experts(self, prefix: str, g: LayerGeometry, moe: Moe) -> Experts:
        """Return the experts block under `prefix`: the whole gate, and this rank's part of the experts and of the
        shared MLP.
        """
        start, stop = self.sharding.expert_columns.span(moe.intermediate)
        local_ids = range(*self.sharding.experts.span(moe.experts))
        biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if moe.storage == "interleaved":
            gates_ups, downs, *bias_tensors = self._interleaved_experts(f"{prefix}.experts", g, moe, local_ids)
            biases = bias_tensors[0], bias_tensors[1]
        else:
            in_shape, out_shape = (moe.intermediate, g.hidden), (g.hidden, moe.intermediate)
            stack_shape = (moe.experts,) if moe.storage == "stacked" else ()

            def place(expert: int, part: str) -> tuple[str, int | None]:
                """Return the name of the tensor, and the index of the expert in it if it holds all experts."""
                if stack_shape:
                    return f"{prefix}.experts.{part}_proj.weight", expert
                return f"{prefix}.experts.{expert}.{part}_proj.weight", None

            def in_matrix(expert: int, part: str) -> CheckpointMatrix:
                name, index = place(expert, part)
                return self.matrix(name, *stack_shape, *in_shape, rows=(start, stop), expert=index)

            def gate_and_up(expert: int) -> CheckpointMatrix:
                return self.concat_outputs([in_matrix(expert, part) for part in ("gate", "up")])

            def down(expert: int) -> CheckpointMatrix:
                name, index = place(expert, "down")
                return self.matrix(name, *stack_shape, *out_shape, columns=(start, stop), expert=index)

            gates_ups, downs = self.stack(local_ids, gate_and_up), self.stack(local_ids, down)
            # Experts of other ranks are checked by their headers, so that every tensor is accounted for.
            others = () if stack_shape else sorted(set(range(moe.experts)) - set(local_ids))
            for expert in others:
                for part, shape in (("gate", in_shape), ("up", in_shape), ("down", out_shape)):
                    self.checkpoint.check_only(place(expert, part)[0], shape)
        take = self.precise_tensor if moe.scoring == "sigmoid" else self.tensor
        gate = Gate(
            weight=self.weight(take(f"{prefix}.router.weight", moe.experts, g.hidden)),
            bias=take(f"{prefix}.router.bias", moe.experts) if moe.router_bias else None,
            correction=self.precise_tensor(f"{prefix}.router.correction", moe.experts) if moe.correction else None,
            moe=moe,
        )
        shared = None
        if moe.shared:
            shared_geometry = replace(g, intermediate=moe.shared, mlp_bias=False)
            shared = self.mlp(f"{prefix}.shared_experts", shared_geometry, self.sharding.shared_expert)
        shared_gate = self.projection(f"{prefix}.shared_gate.weight", 1, g.hidden) if moe.shared_gate else None
        activation = activation_of(g.activation, moe.limit)
        if moe.clamp is not None:
            activation = Activation("clamped", *moe.clamp)
        local = self._local_experts(moe, local_ids) if self.sharding.expert_parallel else None
        return Experts(self.kernels, gate, gates_ups, downs, *biases, shared, activation, shared_gate, local)

    def _local_experts(self, moe: Moe, local_ids: range) -> LocalExperts:
        """Return which experts this rank holds (`local_ids`), and for every expert the shard that holds it."""
        num_shards = self.sharding.experts.size
        shard_of_expert = [
            shard for shard in range(num_shards) for _ in range(*Shard(shard, num_shards).span(moe.experts))
        ]
        return LocalExperts(local_ids.start, len(local_ids), torch.tensor(shard_of_expert, device=self.device))

    def _interleaved_experts(
        self, prefix: str, g: LayerGeometry, moe: Moe, local_ids: range
    ) -> tuple[Stack, Stack, Tensor, Tensor | None]:
        """Return this rank's experts of gpt-oss: the gate and up matrices, the down matrices, the biases of gate and
        up, and the biases of down (None if another rank adds them). On disk, one tensor holds all experts, and the
        outputs of gate and up alternate. A matrix is `[outputs, inputs]` on disk if it is in MXFP4, otherwise `[inputs,
        outputs]`.
        """
        num_experts, hidden, intermediate = moe.experts, g.hidden, moe.intermediate
        span, expert_span = self.sharding.expert_columns.span(intermediate), (local_ids.start, local_ids.stop)
        gate_up_span = (2 * span[0], 2 * span[1])
        output_major = not self.checkpoint.contains(f"{prefix}.gate_up_proj")

        def gate_up(expert: int) -> CheckpointMatrix:
            name = f"{prefix}.gate_up_proj"
            if output_major:
                return permute_outputs(
                    self.matrix(name, num_experts, 2 * intermediate, hidden, rows=gate_up_span, expert=expert),
                    split_alternating,
                )
            return permute_outputs(
                self.tensor(name, num_experts, hidden, 2 * intermediate, columns=gate_up_span, expert=expert).t(),
                split_alternating,
            )

        def down(expert: int) -> CheckpointMatrix:
            name = f"{prefix}.down_proj"
            if output_major:
                return self.matrix(name, num_experts, hidden, intermediate, columns=span, expert=expert)
            return self.tensor(name, num_experts, intermediate, hidden, rows=span, expert=expert).t()

        gates_ups, downs = self.stack(local_ids, gate_up), self.stack(local_ids, down)
        interleaved_bias = self.tensor(
            f"{prefix}.gate_up_proj_bias", num_experts, 2 * intermediate, rows=expert_span, columns=gate_up_span
        )
        down_bias = self.tensor(f"{prefix}.down_proj_bias", num_experts, hidden, rows=expert_span)
        gate_up_bias = concat([interleaved_bias[:, 0::2], interleaved_bias[:, 1::2]], 1)
        return gates_ups, downs, gate_up_bias, down_bias if self.sharding.expert_columns.rank == 0 else None

    def layer(self, prefix: str, g: LayerGeometry) -> DecoderLayer:
        """Return the decoder layer under `prefix`."""
        attention_prefix, mlp_prefix = f"{prefix}.self_attn", f"{prefix}.mlp"
        before_mlp = "before_mlp" if g.sandwich else "post_attention_layernorm"

        def norm_weight(name: str) -> Tensor:
            return self.norm(f"{prefix}.{name}.weight", g.hidden, g.unit_offset)

        return DecoderLayer(
            kernels=self.kernels,
            input_norm=norm_weight("input_layernorm"),
            attention=(self.attention if g.latent is None else self.latent)(attention_prefix, g, g.hidden),
            post_norm=norm_weight(before_mlp),
            mlp=self.mlp(mlp_prefix, g) if g.moe is None else self.experts(mlp_prefix, g, g.moe),
            eps=g.eps,
            after_attention=norm_weight("after_attention") if g.sandwich else None,
            after_mlp=norm_weight("after_mlp") if g.sandwich else None,
        )


def activation_of(kind: Literal["silu", "gelu_tanh"], limit: float | None) -> Activation:
    """Return the activation of this kind; with a `limit`, that of `Moe.limit`."""
    return Activation(kind) if limit is None else Activation("clamped_silu", limit=limit)


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


def local_heads(g: LayerGeometry, shard: Shard) -> LayerGeometry:
    """Return the geometry of one attention shard. If there are fewer KV heads than ranks, several ranks have the same
    KV head.

    Raises:
        ConfigError: the heads cannot be divided among the ranks.
    """
    check_heads(g, shard.size)
    return replace(g, heads=g.heads // shard.size, kv_heads=max(1, g.kv_heads // shard.size))
