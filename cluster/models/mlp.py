"""The dense gated MLP, sharded by intermediate columns, usually over all ranks.

Shape legend: T rows, H hidden, I intermediate columns of this rank.
"""

from dataclasses import dataclass

from torch import Tensor

from cluster.kernels.interface import Activation, Kernels, Weight
from cluster.models.exchange import TokenExchange

SILU = Activation()


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated MLP: down(f(gate) * up), with gate and up packed in one weight `[H, 2 I]`."""

    kernels: Kernels
    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation = SILU

    @property
    def exchange_calls(self) -> tuple[str, ...]:
        """Return the names of the `TokenExchange` methods that a forward calls, in order."""
        return "gather", "scatter"

    def __call__(self, rows: Tensor, exchange: TokenExchange) -> Tensor:
        """Own rows `[T, H]` -> `[T, H]`: gather the rows of all groups, compute partial sums, sum and scatter these."""
        return exchange.scatter(self.partial_sum(exchange.gather(rows)))

    def partial_sum(self, rows: Tensor) -> Tensor:
        """Return this rank's partial sum of the output, `[T, H]`, for `rows` `[T, H]`. Nothing is exchanged."""
        gate_and_up = self.gate_up(rows, self.gate_up_bias)
        return self.down(self.kernels.activate(gate_and_up, self.activation), self.down_bias)
