"""KV memory: of one model runner, and of all of them together."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cluster.batch import PageCopy


class SlotMemory(Protocol):
    """Anything that is kept by slot."""

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """Copy slot `source[i]` onto `destination[i]`; all sources are read before any is written."""
        ...


ALIGNMENT = 64  # bytes, torch's own on a CPU


Cell = tuple[int, int, int]
"""What one token leaves in a layer: `[2, nkv, d]`, k and v, or of latent attention `[1, 1, d]`."""


class KVPool:
    """`kv[layer, slot]` is a cell: k and v side by side, so that one row moves or is gathered at a time."""

    def __init__(self, layers: int, slots: int, cell: Cell, dtype: torch.dtype, device: torch.device) -> None:
        """`slots` counts the sink page too. Zeros: steps that are only timed read cells that nobody wrote."""
        self.kv = zeros((layers, slots, *cell), dtype, device)

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """Copy slot `source[i]` onto `destination[i]` in every layer; all sources are read before any is written."""
        self.kv.index_copy_(1, destination, self.kv.index_select(1, source))


@dataclass(frozen=True, slots=True)
class Pools:
    """All that a rank keeps by slot: the runners' pools, and what a draft keeps beside them."""

    parts: Sequence[SlotMemory]
    page_size: int
    device: torch.device

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Make cells of one page those of another, everywhere."""
        if not copies:
            return
        size = self.page_size
        source = [c.source * size + i for c in copies for i in range(c.tokens)]
        target = [c.target * size + i for c in copies for i in range(c.tokens)]
        where = torch.tensor([target, source], dtype=torch.int64, device=self.device)
        for part in self.parts:
            part.move_kv_cache(where[0], where[1])


def slot_bytes(layers: int, cell: Cell, dtype: torch.dtype) -> int:
    """Bytes that one token costs in a pool."""
    return layers * prod(cell) * dtype.itemsize


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that, on a CPU, take memory only where they are written: calloc's, which torch.zeros would fill at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)
