"""The decoder layer of targets; the parts that drafts use as well are exported from here.

Shape legend: T rows, H hidden. A layer knows neither pages nor ranks: `Attend` is the one attention primitive,
`TokenExchange` the only interface to other ranks.
"""

from dataclasses import dataclass

from torch import Tensor

from cluster.models.arithmetic import norm, project
from cluster.models.attention import Attend, LatentAttention, SelfAttention
from cluster.models.exchange import LAYER_OPS, NoExchange, TokenExchange
from cluster.models.experts import Experts
from cluster.models.mlp import Mlp
from cluster.models.rotary import Angles, RotaryTable

__all__ = [
    "LAYER_OPS",
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
    "norm",
    "project",
]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm decoder layer on the residual stream; `after_*` also norm the outputs of attention and MLP."""

    input_norm: Tensor
    attention: SelfAttention | LatentAttention
    post_norm: Tensor
    mlp: Mlp | Experts
    eps: float
    after_attention: Tensor | None = None
    after_mlp: Tensor | None = None

    def __call__(self, hidden: Tensor, angles: Angles, attend: Attend, layer: int, exchange: TokenExchange) -> Tensor:
        """Residual stream entering the layer -> leaving it, `[T, H]`."""
        normed = norm(hidden, self.input_norm, self.eps)
        out = self.attention(normed, angles, attend, layer, exchange)
        hidden = hidden + (out if self.after_attention is None else norm(out, self.after_attention, self.eps))
        out = self.mlp(norm(hidden, self.post_norm, self.eps), exchange)
        return hidden + (out if self.after_mlp is None else norm(out, self.after_mlp, self.eps))
