"""A KV pool that compacts windows with one Triton kernel launch over all layers."""

from math import prod

from torch import Tensor

from cluster.kernels.launch import launch, whole
from cluster.kernels.move import gpu
from cluster.kv.pool import KVPool

NUMBERS = 128  # elements of a cell that one program moves


class TritonPool(KVPool):
    """A `KVPool` whose moves within windows run in Triton."""

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """Move slots `[R, n]` in Triton, and slots `[n]`, such as page copies, with torch; see `SlotMemory`.

        One Triton program moves all slots of a row: it reads all of them before it writes. Slots `[n]` may overlap
        across programs, so torch moves them.
        """
        if destination.dim() != 2:
            super().move_kv_cache(destination, source)
            return
        (rows, count), (layers, _, *shape) = destination.shape, self.kv.shape
        cell = prod(shape)
        slots = destination.contiguous(), source.contiguous()
        how = {"CELL": cell, "ROWS": whole(count, 1), "BLOCK": NUMBERS}
        launch(gpu.move, (layers, rows, -(-cell // NUMBERS)), self.kv, *slots, self.kv.stride(0), count, **how)
