"""Loading the MLPs of decoder layers from a checkpoint: dense ones, and experts with their router."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from cluster.arch import LayerGeometry, Moe
from cluster.distributed.mesh import Shard
from cluster.kernels.interface import Activation, Stack
from cluster.models.arithmetic import concat
from cluster.models.checkpoint import CheckpointMatrix
from cluster.models.experts import Experts, Gate, LocalExperts, RowNorm
from cluster.models.mlp import Mlp
from cluster.models.weights import WeightLoader, permute_outputs, split_alternating


class MlpLoader(WeightLoader):
    """Loads MLPs and experts: of each tensor, only this rank's shard."""

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

    def experts(self, prefix: str, g: LayerGeometry, moe: Moe, norm: RowNorm | None = None) -> Experts:
        """Return the experts block under `prefix`: the whole gate, and this rank's part of the experts and of the
        shared MLP. `norm` is that of the rows that the experts read; None if the block gets normed rows.
        """
        local_ids = range(*self.sharding.experts.span(moe.experts))
        biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if moe.storage == "interleaved":
            gates_ups, downs, *bias_tensors = self._interleaved_experts(f"{prefix}.experts", g, moe, local_ids)
            biases = bias_tensors[0], bias_tensors[1]
        else:
            gates_ups, downs = self._expert_stacks(f"{prefix}.experts", g, moe, local_ids)
        take = self.precise_tensor if moe.scoring == "sigmoid" else self.tensor
        gate = Gate(
            weight=self.weight(take(f"{prefix}.router.weight", moe.experts, g.hidden)),
            bias=take(f"{prefix}.router.bias", moe.experts) if moe.router_bias else None,
            correction=self.precise_tensor(f"{prefix}.router.correction", moe.experts) if moe.correction else None,
            moe=moe,
            norm=self._router_norm(prefix, g) if moe.normed_router else None,
            expert_scale=self.tensor(f"{prefix}.router.expert_scale", moe.experts) if moe.expert_scale else None,
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
        return Experts(self.kernels, gate, gates_ups, downs, *biases, shared, activation, shared_gate, local, norm)

    def _router_norm(self, prefix: str, g: LayerGeometry) -> RowNorm:
        """Return the norm of the rows that the router reads."""
        scale = self.precise_tensor(f"{prefix}.router.norm", g.hidden)
        return RowNorm(self.kernels, scale * g.hidden**-0.5, g.eps)

    def _expert_stacks(self, prefix: str, g: LayerGeometry, moe: Moe, local_ids: range) -> tuple[Stack, Stack]:
        """Return the gates and ups, and the downs, of this rank's experts under `prefix`, whose tensors are stored as
        `Moe.storage` says: any way but "interleaved".
        """
        num_experts, intermediate = moe.experts, moe.intermediate
        start, stop = self.sharding.expert_columns.span(intermediate)
        in_shape, out_shape = (intermediate, g.hidden), (g.hidden, intermediate)

        def in_matrix(expert: int, part: str) -> CheckpointMatrix:
            if moe.storage == "separate":
                return self.matrix(f"{prefix}.{expert}.{part}_proj.weight", *in_shape, rows=(start, stop))
            if moe.storage == "stacked":
                name = f"{prefix}.{part}_proj.weight"
                return self.matrix(name, num_experts, *in_shape, rows=(start, stop), expert=expert)
            first = intermediate if part == "up" else 0
            name, span = f"{prefix}.gate_up_proj", (first + start, first + stop)
            if moe.storage == "transposed":
                return self.tensor(name, num_experts, g.hidden, 2 * intermediate, columns=span, expert=expert).t()
            return self.matrix(name, num_experts, 2 * intermediate, g.hidden, rows=span, expert=expert)

        def gate_and_up(expert: int) -> CheckpointMatrix:
            return self.concat_outputs([in_matrix(expert, part) for part in ("gate", "up")])

        def down(expert: int) -> CheckpointMatrix:
            if moe.storage == "separate":
                return self.matrix(f"{prefix}.{expert}.down_proj.weight", *out_shape, columns=(start, stop))
            if moe.storage == "transposed":
                name = f"{prefix}.down_proj"
                return self.tensor(name, num_experts, intermediate, g.hidden, rows=(start, stop), expert=expert).t()
            name = f"{prefix}.down_proj.weight" if moe.storage == "stacked" else f"{prefix}.down_proj"
            return self.matrix(name, num_experts, *out_shape, columns=(start, stop), expert=expert)

        gates_ups, downs = self.stack(local_ids, gate_and_up), self.stack(local_ids, down)
        if moe.storage == "separate":
            # Experts of other ranks are checked by their headers, so that every tensor is accounted for.
            for expert in sorted(set(range(num_experts)) - set(local_ids)):
                for part, shape in (("gate", in_shape), ("up", in_shape), ("down", out_shape)):
                    self.checkpoint.check_only(f"{prefix}.{expert}.{part}_proj.weight", shape)
        return gates_ups, downs

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


def activation_of(kind: Literal["silu", "gelu_tanh"], limit: float | None) -> Activation:
    """Return the activation of this kind; with a `limit`, that of `Moe.limit`."""
    return Activation(kind) if limit is None else Activation("clamped_silu", limit=limit)
