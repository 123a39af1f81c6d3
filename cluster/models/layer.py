"""The decoder layer of targets.

Shape legend: T rows, H hidden. A layer reads and writes the KV cache only through an `Attend`, and reaches other ranks
only through a `TokenExchange`.
"""

from dataclasses import dataclass

from torch import Tensor

from cluster.kernels.interface import Angles, Kernels
from cluster.models.attention import Attend, LatentAttention, SelfAttention
from cluster.models.exchange import TokenExchange
from cluster.models.experts import Experts
from cluster.models.mlp import Mlp


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A pre-norm decoder layer; `after_attention` and `after_mlp`, if given, norm the outputs of attention and MLP."""

    kernels: Kernels
    input_norm: Tensor
    attention: SelfAttention | LatentAttention
    post_norm: Tensor
    mlp: Mlp | Experts
    eps: float
    after_attention: Tensor | None = None
    after_mlp: Tensor | None = None

    @property
    def exchange_calls(self) -> tuple[str, ...]:
        """Return the names of the `TokenExchange` methods that a forward calls, in order."""
        return ("reduce", *self.mlp.exchange_calls)

    def __call__(
        self, hidden: Tensor, normed: Tensor, angles: Angles, attend: Attend, layer: int, exchange: TokenExchange
    ) -> tuple[Tensor, Tensor]:
        """Return two tensors `[T, H]`, whose sum is the residual stream that leaves the layer; the caller adds them up
        (`Kernels.add_norm`). `hidden` `[T, H]` is the residual stream that enters the layer, and `normed` `[T, H]` is
        `hidden` after `input_norm`.
        """
        out = self._normed(self.attention(normed, angles, attend, layer, exchange), self.after_attention)
        hidden, normed = self.kernels.add_norm(hidden, out, self.post_norm, self.eps)
        return hidden, self._normed(self.mlp(normed, exchange), self.after_mlp)

    def _normed(self, out: Tensor, weight: Tensor | None) -> Tensor:
        return out if weight is None else self.kernels.norm(out, weight, self.eps)
