"""The decoder layer of targets.

Shape legend: T rows, H hidden. A layer reads and writes the KV cache only through an `Attend`, and reaches other ranks
only through a `TokenExchange`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.kernels.interface import Activation, Angles, Kernels, Weight
from cluster.models.attention import Attend, LatentAttention, SelfAttention
from cluster.models.exchange import TokenExchange
from cluster.models.experts import Experts
from cluster.models.mlp import Mlp


@dataclass(frozen=True, slots=True)
class ExpertsBesideMlp:
    """Experts beside the MLP of a layer (Gemma-4). They read the residual stream through norms of their own.
    `after_mlp` and `after_experts` `[H]` norm the two outputs before they are added.
    """

    experts: Experts
    after_mlp: Tensor
    after_experts: Tensor


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Adds to the residual stream what a layer's own input says (Gemma-4). The gate `[H, P]` reads the residual stream
    and is multiplied by the input `[T, P]`; `projection` `[P, H]` and a norm `[H]` follow. Each rank has all of it.
    """

    kernels: Kernels
    gate: Weight
    projection: Weight
    norm: Tensor
    eps: float
    activation: Activation

    def __call__(self, hidden: Tensor, own_input: Tensor) -> Tensor:
        """Residual stream `[T, H]` and input `[T, P]` -> the new residual stream `[T, H]`."""
        gated = self.kernels.activate(torch.cat([self.gate(hidden), own_input], 1), self.activation)
        return hidden + self.kernels.norm(self.projection(gated), self.norm, self.eps)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A pre-norm decoder layer; `after_attention` and `after_mlp`, if given, norm the outputs of attention and MLP.

    `beside`: experts beside the MLP. `layer_input`: what adds the layer's own input. `scale` `[1]` multiplies the
    residual stream that leaves the layer.
    """

    kernels: Kernels
    input_norm: Tensor
    attention: SelfAttention | LatentAttention
    post_norm: Tensor
    mlp: Mlp | Experts
    eps: float
    after_attention: Tensor | None = None
    after_mlp: Tensor | None = None
    beside: ExpertsBesideMlp | None = None
    layer_input: LayerInput | None = None
    scale: Tensor | None = None

    @property
    def exchange_calls(self) -> tuple[str, ...]:
        """Return the names of the `TokenExchange` methods that a forward calls, in order."""
        beside = () if self.beside is None else self.beside.experts.exchange_calls
        return ("reduce", *self.mlp.exchange_calls, *beside)

    def __call__(
        self,
        hidden: Tensor,
        normed: Tensor,
        angles: Angles,
        attend: Attend,
        layer: int,
        exchange: TokenExchange,
        own_input: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return two tensors `[T, H]`, whose sum is the residual stream that leaves the layer; the caller adds them up
        (`Kernels.add_norm`). The second is None if the first is all of it. `hidden` `[T, H]` is the residual stream
        that enters the layer, and `normed` `[T, H]` is `hidden` after `input_norm`. `own_input` `[T, P]` is the input
        for `layer_input`.
        """
        out = self._normed(self.attention(normed, angles, attend, layer, exchange), self.after_attention)
        hidden, normed = self.kernels.add_norm(hidden, out, self.post_norm, self.eps)
        out = self.mlp(normed, exchange)
        if (beside := self.beside) is not None:
            expert_output = self._normed(beside.experts(hidden, exchange), beside.after_experts)
            out = self._normed(out, beside.after_mlp) + expert_output
        out = self._normed(out, self.after_mlp)
        if self.layer_input is None and self.scale is None:
            return hidden, out
        hidden = hidden + out
        if self.layer_input is not None:
            assert own_input is not None
            hidden = self.layer_input(hidden, own_input)
        return (hidden if self.scale is None else hidden * self.scale), None

    def _normed(self, out: Tensor, weight: Tensor | None) -> Tensor:
        return out if weight is None else self.kernels.norm(out, weight, self.eps)


def run_layers(
    layers: Sequence[DecoderLayer],
    hidden: Tensor,
    angles: Sequence[Angles],
    attend: Attend,
    exchange: TokenExchange,
    own_inputs: Tensor | None = None,
    boundaries: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Run `layers` on the residual stream `hidden` `[T, H]`. `angles` has those of each layer, and `own_inputs`
    `[T, L, P]` the inputs of each.

    Return two tensors, whose sum is the residual stream that leaves the last layer (see `DecoderLayer`), and the
    residual stream that enters each layer whose number is in `boundaries`.
    """
    aux: list[Tensor] = []
    # The residual stream is `hidden` + `residual_update`: `add_norm` adds them, in one kernel with the norm.
    residual_update: Tensor | None = None
    for index, layer in enumerate(layers):
        hidden, normed = layer.kernels.add_norm(hidden, residual_update, layer.input_norm, layer.eps)
        if index in boundaries:
            aux.append(hidden)
        own_input = None if own_inputs is None else own_inputs[:, index]
        hidden, residual_update = layer(hidden, normed, angles[index], attend, index, exchange, own_input)
    return hidden, residual_update, aux
