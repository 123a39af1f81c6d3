"""A KV pool that moves the KV of accepted tokens with one C call over all layers."""

from typing import Any

import torch
from torch import Tensor

from cluster.capture.recorder import native
from cluster.kernels.library import Library
from cluster.kv.pool import KVPool
from cluster.kv.window_map import WindowMap


class CPool(KVPool):
    """A `KVPool` that moves KV in C. Cells whose source and destination are the same slot are skipped; most cells of an
    accepted path are.
    """

    def __init__(self, *arguments: Any, library: Library) -> None:
        """`arguments` are those of `KVPool`."""
        super().__init__(*arguments)
        self._move = library.functions["move", torch.float32]  # the function moves bytes: any dtype will do

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """Copy cells from slot to slot in every layer; see `SlotMemory.move_kv_cache`."""
        self._move_cells(destination, source, self.window_map)

    def move_own_slots(self, destination: Tensor, source: Tensor) -> None:
        """Copy cells between slots of this pool; see `KVPool.move_own_slots`."""
        self._move_cells(destination, source, None)

    def _move_cells(self, destination: Tensor, source: Tensor, window_map: WindowMap | None) -> None:
        destination, source, layer_bytes = destination.contiguous(), source.contiguous(), self.kv.stride(0)
        native(
            self._move,
            *(self.kv.data_ptr(), destination.data_ptr(), source.data_ptr(), source.numel(), self.layers),
            layer_bytes * self.kv.itemsize,
            self.kv.stride(1) * self.kv.itemsize,
            *(None, 1) if window_map is None else (window_map.device_pages.data_ptr(), window_map.page_size),
        )
