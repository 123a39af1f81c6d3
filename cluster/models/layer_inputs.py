"""The inputs of each layer of a target (Gemma-4): made of the token and of its embedding, before the first layer."""

from dataclasses import dataclass
from math import sqrt

import torch.nn.functional as F
from torch import Tensor

from cluster.arch import TargetArch
from cluster.kernels.interface import Kernels, Weight
from cluster.models.load import Loader


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Makes the inputs of all L layers, of width P each. `table` `[V, L P]` has a row for each token id; `projection`
    `[H, L P]` reads the embedding, and `norm` `[P]` norms what it yields for each layer.

    Each rank has all of it: the table is large, but a lookup in it needs no exchange between ranks.
    """

    kernels: Kernels
    table: Tensor
    projection: Weight
    norm: Tensor
    eps: float

    def __call__(self, token_ids: Tensor, embedding: Tensor) -> Tensor:
        """Token ids `[T]` and their scaled embeddings `[T, H]` -> the inputs of the layers, `[T, L, P]`."""
        width, columns = self.norm.shape[0], self.table.shape[1]
        projected = (self.projection(embedding) * embedding.shape[1] ** -0.5).view(-1, width)
        from_embedding = self.kernels.norm(projected, self.norm, self.eps)
        from_token = F.embedding(token_ids, self.table).view(-1, width) * sqrt(width)
        return ((from_embedding + from_token) * sqrt(0.5)).view(-1, columns // width, width)


def load_layer_inputs(load: Loader, arch: TargetArch) -> LayerInputs:
    """Load what makes the inputs of the layers of `arch`."""
    width, columns = arch.layer.layer_input, arch.num_layers * arch.layer.layer_input
    return LayerInputs(
        kernels=load.kernels,
        table=load.tensor("layer_inputs.embed_tokens.weight", arch.layer_input_vocab, columns),
        projection=load.projection("layer_inputs.projection.weight", columns, arch.hidden),
        norm=load.norm("layer_inputs.norm.weight", width, arch.layer.unit_offset),
        eps=arch.layer.eps,
    )
