"""The dense MLP: gated, and sharded by columns over all ranks.

Shape legend: T rows, H hidden, I intermediate columns of this rank.
"""

from dataclasses import dataclass

from torch import Tensor

from cluster.kernels.interface import Activation, Kernels, Weight
from cluster.models.exchange import TokenExchange

SILU = Activation()


@dataclass(frozen=True, slots=True)
class Mlp:
    """Gated MLP with the gate and up weights packed, `[H, 2 I]`."""

    kernels: Kernels
    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation = SILU

    @property
    def ops(self) -> tuple[str, ...]:
        """The exchange calls that it makes, in order."""
        return "gather", "scatter"

    def __call__(self, rows: Tensor, exchange: TokenExchange) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        return exchange.scatter(self.part(exchange.gather(rows)))

    def part(self, rows: Tensor) -> Tensor:
        """This rank's partial sum, `[T, H]`."""
        both = self.gate_up(rows, self.gate_up_bias)
        return self.down(self.kernels.activate(both, self.activation), self.down_bias)
