"""The decoder layer of targets; the parts that drafts use as well are exported from here.

Shape legend: T rows, H hidden. A layer knows neither pages nor ranks: `Attend` is the one attention primitive,
`TokenExchange` the only interface to other ranks.
"""

from dataclasses import dataclass

from torch import Tensor

from cluster.kernels.interface import Angles, Kernels
from cluster.models.attention import Attend, LatentAttention, SelfAttention
from cluster.models.exchange import NoExchange, TokenExchange
from cluster.models.experts import Experts
from cluster.models.mlp import Mlp
from cluster.models.rotary import RotaryTable

__all__ = [
    "Angles",
    "Attend",
    "DecoderLayer",
    "Experts",
    "LatentAttention",
    "Mlp",
    "NoExchange",
    "RotaryTable",
    "SelfAttention",
    "TokenExchange",
]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm decoder layer on the residual stream; `after_*` also norm the outputs of attention and MLP."""

    kernels: Kernels
    input_norm: Tensor
    attention: SelfAttention | LatentAttention
    post_norm: Tensor
    mlp: Mlp | Experts
    eps: float
    after_attention: Tensor | None = None
    after_mlp: Tensor | None = None

    @property
    def ops(self) -> tuple[str, ...]:
        """The exchange calls that it makes, in order."""
        return ("reduce", *self.mlp.ops)

    def __call__(
        self, hidden: Tensor, normed: Tensor, angles: Angles, attend: Attend, layer: int, exchange: TokenExchange
    ) -> tuple[Tensor, Tensor]:
        """The residual stream entering the layer, and its `input_norm` -> two parts of the stream leaving it, which the
        next norm adds up, `[T, H]` each.
        """
        out = self._after(self.attention(normed, angles, attend, layer, exchange), self.after_attention)
        hidden, normed = self.kernels.add_norm(hidden, out, self.post_norm, self.eps)
        return hidden, self._after(self.mlp(normed, exchange), self.after_mlp)

    def _after(self, out: Tensor, scale: Tensor | None) -> Tensor:
        return out if scale is None else self.kernels.norm(out, scale, self.eps)
