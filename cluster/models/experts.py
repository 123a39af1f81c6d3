"""A mixture of experts: gated MLPs, and the gate (router) that chooses among them. Either every expert is sharded by
columns over all ranks, or the layer is expert-parallel: each rank holds some of the experts, or some of their columns.

Shape legend: T rows, H hidden, I intermediate columns of this rank, E experts of this rank, k experts that a row takes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.arch import Moe
from cluster.kernels.interface import Activation, Groups, Kernels, Stack, Weight
from cluster.models.exchange import EXPERT_CALLS, ExpertRouting, TokenExchange
from cluster.models.mlp import Mlp


@dataclass(frozen=True, slots=True)
class RowNorm:
    """An RMSNorm of rows `[T, H]` times `scale` `[H]`."""

    kernels: Kernels
    scale: Tensor
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows `[T, H]` -> `[T, H]`."""
        return self.kernels.norm(rows, self.scale, self.eps)


@dataclass(frozen=True, slots=True)
class Gate:
    """The router: chooses the k experts of a row and their weights. Each rank has all of it, so all choose the same.

    If `norm` is given, the router reads normed rows. If `expert_scale` `[E]` is given, it multiplies the weights.
    """

    weight: Weight
    bias: Tensor | None
    correction: Tensor | None
    moe: Moe
    norm: RowNorm | None = None
    expert_scale: Tensor | None = None

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows `[T, H]` -> the weights of their experts and the ids of their experts, `[T, k]` each.

        If experts are in groups (DeepSeek-V3, arXiv 2412.19437, 2.1.2), only those of the best groups can be chosen.
        The score of a group is the sum of the scores of its two best experts. For these choices, `correction` (None: 0)
        is added to the scores of the experts; it does not change their weights.
        """
        moe, rows = self.moe, rows if self.norm is None else self.norm(rows)
        logits = self.weight(rows.to(self.weight.dtype), self.bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        scores = logits.softmax(-1) if moe.scoring == "softmax" else logits.sigmoid()
        ranking = scores if self.correction is None else scores + self.correction
        if moe.scoring == "sigmoid" and moe.groups == 1 and self.correction is None:
            # The sigmoids of different large logits are rounded to equal scores. The logits are in the same order.
            ranking = logits
        if moe.groups > 1:
            grouped = ranking.view(-1, moe.groups, moe.experts // moe.groups)
            best_groups = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1).topk(moe.top_groups, -1).indices
            # Experts outside the best groups cannot be chosen.
            excluded = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best_groups, False)
            ranking = grouped.masked_fill(excluded[..., None], float("-inf")).view_as(ranking)
        expert_ids = ranking.topk(moe.active, -1).indices
        weights = scores.gather(1, expert_ids)
        if moe.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[expert_ids]
        return (weights * moe.scale).to(rows.dtype), expert_ids


@dataclass(frozen=True, slots=True)
class LocalExperts:
    """This rank's experts in an expert-parallel layer: ids `first` to `first + count - 1`. `shard_of_expert` has, for
    each expert of the layer, the number of the shard of experts that holds it.
    """

    first: int
    count: int
    shard_of_expert: Tensor


@dataclass(frozen=True, slots=True)
class Experts:
    """E gated MLPs: `gate_up` `[E, H, 2 I]`, `down` `[E, I, H]`, biases `[E, 2 I]` and `[E, H]`.

    `shared` is an MLP that every token takes; None if there is none. Each rank has the whole `shared_gate` `[H, 1]`,
    and multiplies its partial sum of `shared` by the gate's sigmoid (`shared_gate` None: by 1). If the layer is
    expert-parallel, `local` says which experts this rank holds, and `shared` is sharded over the attention group. If
    `local` is None, this rank has some columns of every expert and of `shared`.

    If `norm` is given, the experts read normed rows. The router reads the rows as they are, through `Gate.norm`.
    """

    kernels: Kernels
    gate: Gate
    gate_up: Stack
    down: Stack
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    shared: Mlp | None
    activation: Activation
    shared_gate: Weight | None = None
    local: LocalExperts | None = None
    norm: RowNorm | None = None

    @property
    def exchange_calls(self) -> tuple[str, ...]:
        """Return the names of the `TokenExchange` methods that a forward calls, in order."""
        return ("gather", "scatter") if self.local is None else (EXPERT_CALLS,)

    def __call__(self, rows: Tensor, exchange: TokenExchange) -> Tensor:
        """Own rows `[T, H]` -> the output of the layer for them, `[T, H]`."""
        if self.local is None:
            rows = exchange.gather(rows)
            out, shared_output = self.run(rows, *self.gate(rows)), self.shared_output(rows)
            return exchange.scatter(out if shared_output is None else out + shared_output)
        shared_output = self.shared_output(rows)
        if exchange.routes_to_experts:
            return exchange.to_experts(rows, self, shared_output)
        rows = exchange.gather(rows)
        return exchange.scatter(self.run(rows, *self.gate(rows)), shared_output)

    def choose(self, rows: Tensor) -> ExpertRouting:
        """Return the experts of `rows` `[T, H]`, which may be on any rank. Only for expert-parallel layers."""
        assert self.local is not None, "all experts are here"
        weights, expert_ids = self.gate(rows)
        return ExpertRouting(weights, expert_ids, self.local.shard_of_expert[expert_ids])

    def shared_output(self, rows: Tensor) -> Tensor | None:
        """Return this rank's partial sum of the shared MLP, `[T, H]`; None if there is no shared MLP."""
        if self.shared is None:
            return None
        shared_output = self.shared.partial_sum(rows)
        return shared_output if self.shared_gate is None else shared_output * self.shared_gate(rows).sigmoid()

    def run(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Run each expert of this rank once, on the rows that chose it. Return each row's weighted sum of the outputs
        of this rank's experts, `[T, H]`.

        `rows` are `[T, H]`; `weights` and the expert ids `experts` are `[T, k]`. The terms of a row are added in order
        of expert ids. If `Moe.scales_inputs`, the weights multiply the rows that enter an expert, and its outputs are
        just added.
        """
        rows = rows if self.norm is None else self.norm(rows)
        input_weights, weights = (weights, torch.ones_like(weights)) if self.gate.moe.scales_inputs else (None, weights)
        if self.local is None:
            groups = self.kernels.group(experts, self.gate.moe.experts)
            outputs = self._expert_outputs(rows, groups, groups.ends, groups.place_experts, input_weights)
            return self.kernels.combine(outputs, groups, weights, self.down_bias)
        first, count = self.local.first, self.local.count
        # All experts of other ranks become one extra expert, number `count`, which sorts behind all others. Nothing is
        # computed for its places; their output, which is not initialised, is replaced by zeros.
        local_ids = torch.where((experts < first) | (experts >= first + count), count, experts - first)
        groups = self.kernels.group(local_ids, count + 1)
        expert_of_row = groups.place_experts.clamp(max=count - 1)
        outputs = self._expert_outputs(rows, groups, groups.ends[:count], expert_of_row, input_weights)
        outputs = outputs if self.down_bias is None else outputs + self.down_bias[expert_of_row]
        return self.kernels.combine(
            outputs.masked_fill_((groups.place_experts == count)[:, None], 0.0), groups, weights, None
        )

    def _expert_outputs(
        self, rows: Tensor, groups: Groups, ends: Tensor, expert: Tensor, input_weights: Tensor | None
    ) -> Tensor:
        """Return the experts' outputs by place of `groups`, `[T k, H]`, without the bias of `down`. `expert` is the
        expert of each place, and `ends` as in `Groups`. `input_weights` `[T, k]` multiply the rows; None: nothing does.
        """
        rows = rows.index_select(0, groups.source_rows)
        if input_weights is not None:
            place_weights = input_weights.new_empty(input_weights.numel())
            place_weights.index_copy_(0, groups.places.reshape(-1).long(), input_weights.reshape(-1))
            rows = rows * place_weights[:, None]
        activations = self.gate_up(rows, ends)
        activations = activations if self.gate_up_bias is None else activations + self.gate_up_bias[expert]
        return self.down(self.kernels.activate(activations, self.activation), ends)
