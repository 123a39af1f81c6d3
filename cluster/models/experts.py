"""A mixture of experts: gated MLPs sharded by columns over all ranks, and the gate that chooses among them.

Shape legend: T rows, H hidden, I intermediate columns of this rank, E experts, k of them active per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.arch import Moe
from cluster.kernels.interface import Activation, Kernels, Stack, Weight
from cluster.models.exchange import TokenExchange
from cluster.models.mlp import Mlp


@dataclass(frozen=True, slots=True)
class Gate:
    """The router: which experts a token takes, with what weights. Replicated, so that all ranks choose alike."""

    weight: Weight
    bias: Tensor | None
    correction: Tensor | None
    moe: Moe

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`[T, H]` -> (weights, experts) `[T, k]`.

        Grouped choice as in DeepSeek-V3 (arXiv 2412.19437, 2.1.2): a group is scored by its two best experts;
        the correction affects which experts are chosen, not their weights.
        """
        moe = self.moe
        scores = self.weight(rows.to(self.weight.dtype), self.bias)
        wide = scores if scores.dtype == torch.float64 else scores.float()
        scores = wide.softmax(-1) if moe.scoring == "softmax" else wide.sigmoid()
        ranked = scores if self.correction is None else scores + self.correction
        if moe.groups > 1:
            grouped = ranked.view(-1, moe.groups, moe.experts // moe.groups)
            best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1).topk(moe.top_groups, -1).indices
            closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
            ranked = grouped.masked_fill(closed[..., None], float("-inf")).view_as(ranked)
        chosen = ranked.topk(moe.active, -1).indices
        weights = scores.gather(1, chosen)
        if moe.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights * moe.scale).to(rows.dtype), chosen


@dataclass(frozen=True, slots=True)
class Experts:
    """E gated MLPs: `gate_up` `[E, H, 2 I]`, `down` `[E, I, H]`, biases `[E, 2 I]` and `[E, H]`.

    `shared_gate` `[H, 1]` is replicated: it multiplies the partial sums of all ranks alike.
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

    def __call__(self, rows: Tensor, exchange: TokenExchange) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        rows = exchange.gather(rows)
        weights, chosen = self.gate(rows)
        out = self.grouped(rows, weights, chosen)
        if self.shared is not None:
            common = self.shared.part(rows)
            out = out + (common if self.shared_gate is None else common * self.shared_gate(rows).sigmoid())
        return exchange.scatter(out)

    def grouped(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Run each expert once, on the rows that chose it; a row's experts are summed in order of their index."""
        groups = self.kernels.group(chosen, self.gate.moe.experts)
        inner = self.gate_up(rows.index_select(0, groups.source), groups.ends)
        inner = inner if self.gate_up_bias is None else inner + self.gate_up_bias[groups.expert]
        made = self.down(self.kernels.activate(inner, self.activation), groups.ends)
        return self.kernels.combine(made, groups, weights, self.down_bias)
