"""A mixture of experts: gated MLPs sharded by columns over all ranks, and the gate that chooses among them.

Shape legend: T rows, H hidden, I intermediate columns of this rank, E experts, k of them active per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.arch import Moe
from cluster.models.arithmetic import project
from cluster.models.exchange import TokenExchange
from cluster.models.mlp import Activate, Mlp


@dataclass(frozen=True, slots=True)
class Gate:
    """The router: which experts a token takes, with what weights. Replicated, so that all ranks choose alike."""

    weight: Tensor
    bias: Tensor | None
    correction: Tensor | None
    moe: Moe

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`[T, H]` -> (weights, experts) `[T, k]`.

        Grouped choice as in DeepSeek-V3 (arXiv 2412.19437, 2.1.2): a group is scored by its two best experts;
        the correction affects which experts are chosen, not their weights.
        """
        moe = self.moe
        scores = project(rows.to(self.weight.dtype), self.weight, self.bias)
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

    gate: Gate
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    shared: Mlp | None
    activate: Activate
    shared_gate: Tensor | None = None

    def __call__(self, rows: Tensor, exchange: TokenExchange) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        rows = exchange.gather(rows)
        weights, chosen = self.gate(rows)
        out = self.grouped(rows, weights, chosen)
        if self.shared is not None:
            common = self.shared.part(rows)
            out = out + (common if self.shared_gate is None else common * project(rows, self.shared_gate).sigmoid())
        return exchange.scatter(out)

    def grouped(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Run each expert once, on the rows that chose it; a row's experts are summed in order of their index."""
        experts, active = self.gate_up.shape[0], chosen.shape[1]
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        sources, scales = order // active, weights.flatten()[order, None]
        out, start = torch.zeros_like(rows), 0
        for expert, count in enumerate(flat.bincount(minlength=experts).tolist()):
            if count:
                own = slice(start, start + count)
                out.index_add_(0, sources[own], self._expert(expert, rows[sources[own]]).mul_(scales[own]))
                start += count
        return out

    def _expert(self, expert: int, rows: Tensor) -> Tensor:
        bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
        gate, up = project(rows, self.gate_up[expert], bias).chunk(2, -1)
        clamp = self.gate.moe.clamp
        if clamp is None:
            inner = self.activate(gate).mul_(up)
        else:
            alpha, limit = clamp
            gate = gate.clamp(max=limit)
            inner = (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(gate * alpha)
        return project(inner, self.down[expert], None if self.down_bias is None else self.down_bias[expert])
