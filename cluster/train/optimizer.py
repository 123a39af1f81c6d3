"""Muon for the matrices of the layers, AdamW for the rest, and the learning-rate schedule."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def orthogonalize(gradient: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Return approximately the nearest semi-orthogonal matrix of each matrix; shape [count, rows, columns] in and out.

    The method is Newton-Schulz iteration. Its quintic polynomial and the coefficients are from Keller Jordan's Muon.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = gradient.shape[1] > gradient.shape[2]
    x = gradient.mT if tall else gradient
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: torch.Tensor = x.mT if tall else x
    return result


class Muon(torch.optim.Optimizer):
    """The Muon optimizer: Nesterov momentum with an orthogonalized update. Matrices of one shape are computed together.

    torch.optim.Muon computes in bfloat16, which takes 35 times as long on a CPU without bfloat16 instructions.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                updates: list[torch.Tensor] = []
                for matrix in matrices:
                    gradient = matrix.grad
                    assert gradient is not None
                    state = self.state[matrix]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(matrix)
                    state["momentum"].lerp_(gradient, 1 - group["momentum"])
                    updates.append(gradient.lerp(state["momentum"], group["momentum"]))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for matrix, update in zip(matrices, orthogonalize(torch.stack(updates)), strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(update, alpha=-scale)


class Optimizers:
    """Muon and AdamW behind one interface. A step's learning rates are the peak rates times the step's factor."""

    def __init__(
        self, matrices: list[nn.Parameter], others: list[nn.Parameter], *, matrix_lr: float, other_lr: float
    ) -> None:
        self.parameters = matrices + others
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=matrix_lr),
            torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0),
        ]
        self.peak_lrs = [matrix_lr, other_lr]

    def step(self, factor: float) -> None:
        """Clip the gradients, update the parameters at `factor` times the peak rates, and clear the gradients."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer, peak_lr in zip(self.optimizers, self.peak_lrs, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of both optimizers, Muon first."""
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restore the states of both optimizers."""
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def clock_factor(progress: float, warmup: float = 0.015, floor: float = 0.02) -> float:
    """Return the learning rate factor at `progress` (0 to 1) of the budget: a short warmup, then linear decay."""
    if progress < warmup:
        return max(0.05, progress / warmup)
    remaining = max(0.0, 1.0 - progress) / (1.0 - warmup)
    return floor + (1.0 - floor) * remaining
