"""The dense MLP: gated, and sharded by columns over all ranks.

Shape legend: T rows, H hidden, I intermediate columns of this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from cluster.models.arithmetic import project
from cluster.models.exchange import TokenExchange

Activate = Callable[[Tensor], Tensor]


def gelu_tanh(rows: Tensor) -> Tensor:
    """GELU in its tanh approximation."""
    return F.gelu(rows, approximate="tanh")


ACTIVATIONS: dict[str, Activate] = {"silu": F.silu, "gelu_tanh": gelu_tanh}


@dataclass(frozen=True, slots=True)
class Mlp:
    """Gated MLP with the gate and up weights packed, `[H, 2 I]`."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activate: Activate = F.silu

    def __call__(self, rows: Tensor, exchange: TokenExchange) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        return exchange.scatter(self.part(exchange.gather(rows)))

    def part(self, rows: Tensor) -> Tensor:
        """This rank's partial sum, `[T, H]`."""
        gate, up = project(rows, self.gate_up, self.gate_up_bias).chunk(2, -1)
        return project(self.activate(gate).mul_(up), self.down, self.down_bias)
