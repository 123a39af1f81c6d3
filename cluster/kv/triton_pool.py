"""A KV pool that moves the KV of accepted tokens with one Triton kernel launch over all layers."""

from math import prod

from torch import Tensor

from cluster.kernels.launch import launch, next_power_of_2
from cluster.kernels.move.gpu import MoveArguments, move
from cluster.kv.pool import KVPool

ELEMENTS_PER_PROGRAM = 128  # elements of a cell that one program moves


class TritonPool(KVPool):
    """A `KVPool` that moves KV with a Triton kernel if each request moves only its own slots, otherwise with torch."""

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """Move slots `[R, n]` in Triton, and slots `[n]` with torch; see `SlotMemory`.

        One Triton program moves all slots of a row, and reads all of them before it writes. Slots `[n]` would be moved
        by several programs, and one could overwrite a slot before another has read it. So torch moves them.
        """
        if destination.dim() != 2:
            super().move_kv_cache(destination, source)
            return
        (rows, count), (layers, _, *shape) = destination.shape, self.kv.shape
        cell_elements = prod(shape)
        window_map, slots = self.window_map, (destination.contiguous(), source.contiguous())
        window_pages = None if window_map is None else window_map.device_pages
        arguments = MoveArguments(self.kv, *slots, window_pages, self.kv.stride(0), count)
        grid = layers, rows, -(-cell_elements // ELEMENTS_PER_PROGRAM)
        launch(
            move,
            grid,
            arguments,
            CELL_SIZE=cell_elements,
            PAGE_SIZE=0 if window_map is None else window_map.page_size,
            SLOT_BLOCK=next_power_of_2(count, 1),
            BLOCK=ELEMENTS_PER_PROGRAM,
        )
