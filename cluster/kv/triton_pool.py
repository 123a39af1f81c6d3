"""A pool whose windows are compacted by one program of Triton, over all layers."""

from math import prod

from torch import Tensor

from cluster.kernels.launch import launch, whole
from cluster.kernels.move import gpu
from cluster.kv.pool import KVPool

NUMBERS = 128  # of a cell, for one program


class TritonPool(KVPool):
    """A `KVPool` for programs of Triton."""

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """See `SlotMemory.move_kv_cache`; what has no rows of its own, such as copies of pages, is torch's."""
        if destination.dim() != 2:
            super().move_kv_cache(destination, source)
            return
        (rows, count), (layers, _, *shape) = destination.shape, self.kv.shape
        cell = prod(shape)
        slots = destination.contiguous(), source.contiguous()
        how = {"CELL": cell, "ROWS": whole(count, 1), "BLOCK": NUMBERS}
        launch(gpu.move, (layers, rows, -(-cell // NUMBERS)), self.kv, *slots, self.kv.stride(0), count, **how)
