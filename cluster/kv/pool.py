"""The KV pool of one model runner: the tensor that holds the cells of all its layers.

A new kind of pool also needs a line in `IMPLEMENTATIONS` of `engine/backends.py`.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cluster.arch.cell import Cell
from cluster.arch.layer import LayerGeometry
from cluster.batch import PageCopy
from cluster.kv.window_map import WindowMap


class SlotMemory(Protocol):
    """Memory indexed by slot. What slots hold is moved when accepted tokens are compacted or pages are copied."""

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """Copy slot `source[i]` to slot `destination[i]`. All sources are read before any slot is written.

        If the slots have the shape `[R, n]`, no row may use a slot of another row, so that rows can be moved in
        parallel.
        """


ALIGNMENT = 64  # bytes; the alignment that torch gives CPU tensors


class KVPool:
    """The KV cache tensor `kv[layer, slot]`. A cell is what one token stores in one layer. It holds k and v side by
    side, or one latent, so that one index copies or gathers all of it. Without FP8, `kv` has the shape
    `[layers, slots, *cell.shape]`; in FP8, `[layers, slots, cell.fp8_bytes]`. `dtype` is the dtype of a cell before it
    is encoded in FP8.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        cell: Cell,
        dtype: torch.dtype,
        device: torch.device,
        fp8: bool = False,
        window_map: WindowMap | None = None,
    ) -> None:
        """Allocate `slots` slots, including the slots of the sink page. If `fp8`, cells are stored in FP8. With
        `window_map`, this is a window pool: callers pass slots of the other pools, and the map says which slots of this
        pool belong to them.

        The memory starts as zeros, because steps that run only for timing read cells that were never written.
        """
        self.layers, self.slots, self.cell, self.dtype, self.fp8 = layers, slots, cell, dtype, fp8
        self.window_map = window_map
        shape, stored_dtype = ((cell.fp8_bytes,), torch.uint8) if fp8 else (cell.shape, dtype)
        self.kv = zeros((layers, slots, *shape), stored_dtype, device)

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """Copy cells from slot to slot in every layer; see `SlotMemory.move_kv_cache`."""
        self.move_own_slots(self.own_slots(destination), self.own_slots(source))

    def move_own_slots(self, destination: Tensor, source: Tensor) -> None:
        """Copy cells as `move_kv_cache` does. The slots are those of this pool, even in a window pool."""
        self.kv.index_copy_(1, destination.reshape(-1), self.kv.index_select(1, source.reshape(-1)))

    def own_slots(self, slots: Tensor) -> Tensor:
        """Return the slots of this pool that belong to `slots`, which are numbered as in pools without a window."""
        return slots if self.window_map is None else self.window_map.slots(slots)


def copied_slots(copies: Sequence[PageCopy], page_size: int, window: bool = False) -> list[int]:
    """Return the slots that `copies` write, followed by the slots that they read, in the same order: slots of window
    pools if `window`, else of the other pools.
    """
    targets = [(copy.window_target if window else copy.target, copy.tokens) for copy in copies]
    sources = [(copy.window_source if window else copy.source, copy.tokens) for copy in copies]
    return [page * page_size + cell for page, tokens in targets + sources for cell in range(tokens)]


def pool_bytes(layers: Iterable[LayerGeometry], dtype: torch.dtype, fp8: bool) -> int:
    """Return the bytes that one token takes in pools for `layers`, in FP8 if `fp8` is True, else in `dtype`."""
    own_cells = [layer.cell for layer in layers if layer.borrows is None]
    return sum(cell.fp8_bytes if fp8 else cell.numbers * dtype.itemsize for cell in own_cells)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On a CPU, its memory pages are taken only when they are written: numpy uses calloc, but
    torch.zeros would fill them at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    buffer = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return torch.from_numpy(buffer[start : start + size]).view(dtype).view(shape)
