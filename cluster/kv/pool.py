"""KV memory of one model runner."""

from collections.abc import Sequence
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cluster.arch.cell import CodedCell
from cluster.batch import PageCopy


class SlotMemory(Protocol):
    """Any memory that is indexed by slot."""

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """Copy slot `source[i]` onto `destination[i]`; all sources are read before any is written.

        Of slots `[R, n]` each row has its own.
        """
        ...


ALIGNMENT = 64  # bytes, torch's own on a CPU


Cell = tuple[int, int, int]
"""Shape of one token's entry in a layer: k and v `[2, nkv, d]`, or in latent attention `[1, 1, d]`."""


class KVPool:
    """`kv[layer, slot]` is a cell: k and v side by side, so that one index copies or gathers both; in FP8 with their
    scales. `cell` and `dtype` are those of k and v as they are computed.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        cell: Cell,
        dtype: torch.dtype,
        device: torch.device,
        coded: CodedCell | None = None,
    ) -> None:
        """`slots` counts the sink page too. `coded`: cells are kept so. All zeros, as steps that are only timed read
        cells before any write.
        """
        self.layers, self.slots, self.cell, self.dtype, self.coded = layers, slots, cell, dtype, coded
        shape, kept = (cell, dtype) if coded is None else ((coded.nbytes,), torch.uint8)
        self.kv = zeros((layers, slots, *shape), kept, device)

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """See `SlotMemory.move_kv_cache`; in every layer."""
        self.kv.index_copy_(1, destination.reshape(-1), self.kv.index_select(1, source.reshape(-1)))


def cells_of(copies: Sequence[PageCopy], page_size: int) -> list[int]:
    """The slots that `copies` write, then those that they read, in the same order."""
    written = [copy.target * page_size + cell for copy in copies for cell in range(copy.tokens)]
    return written + [copy.source * page_size + cell for copy in copies for cell in range(copy.tokens)]


def slot_bytes(layers: int, cell: Cell, dtype: torch.dtype, coded: CodedCell | None = None) -> int:
    """Bytes that one token takes in a pool."""
    return layers * (prod(cell) * dtype.itemsize if coded is None else coded.nbytes)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that on a CPU take memory only where they are written: numpy's calloc, as torch.zeros fills at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)
