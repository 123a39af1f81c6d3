"""The attention of a model whose layers are in several KV pools, or borrow the cells of other layers."""

from collections.abc import Sequence

from torch import Tensor

from cluster.batch import AttentionMetadata, HostBounds
from cluster.models.runner import AttentionBackend


class LayeredAttention:
    """Passes each call to the attention of the pool that holds the layer."""

    def __init__(self, parts: Sequence[AttentionBackend], places: Sequence[tuple[int, int]]) -> None:
        """`places` has for each layer of the model the index of its part, and the number of the layer in that part's
        pool. A layer that borrows has the place of the layer whose cells it reads.
        """
        self._parts = tuple(parts)
        self._places = [(self._parts[part], layer) for part, layer in places]

    def prepare(self, bounds: HostBounds) -> None:
        """Prepare a step within `bounds`."""
        for part in self._parts:
            part.prepare(bounds)

    def bind(self, metadata: AttentionMetadata) -> None:
        """Use `metadata` for the attention calls of the next forward."""
        for part in self._parts:
            part.bind(metadata)

    def __call__(self, layer: int, q: Tensor, kv: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        """Attend in layer `layer` of the model; see `Attend`."""
        part, own_layer = self._places[layer]
        return part(own_layer, q, kv, sinks)
