"""A device of so many bytes, on a CPU: every tensor that torch makes while it is entered lies in its memory.

It is as unkind as CUDA's caching allocator (pytorch, c10/cuda/CUDACachingAllocator.cpp): memory comes from the device
in blocks of fixed sizes, is cut and not moved, and a block goes back only when all of it is unused. Sizes are CUDA's,
divided by `SCALE`, as the models here are small. Memory inside an operator is not seen.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cluster.kv.device_memory import DeviceMemoryError

SCALE = 256
GRAIN = 512 // 32
SMALL, MEDIUM = (1 << 20) // SCALE, 10 * (1 << 20) // SCALE
SMALL_BLOCK, MEDIUM_BLOCK, ROUND = (2 << 20) // SCALE, (20 << 20) // SCALE, (2 << 20) // SCALE


@dataclass(eq=False)
class Piece:
    """A part of a block, or all of it."""

    size: int
    used: bool = False


@dataclass(eq=False)
class Block:
    """What was taken from the device at once."""

    size: int
    small: bool
    pieces: list[Piece] = field(default_factory=list)
    captured: bool = False


class SimulatedMemory(TorchDispatchMode):
    """A `DeviceMemory`. `beside` bytes are taken by others. `most` is what was ever in use at once, by all."""

    def __init__(self, total: int, beside: int = 0) -> None:
        super().__init__()
        self.total_bytes, self.beside, self.most = total, beside, beside
        self._blocks: list[Block] = []
        self._live: dict[int, tuple[Block, Piece]] = {}
        self._held = self._peak = 0
        self._capturing = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._live and storage.nbytes():
                    self._live[storage._cdata] = self._take(storage.nbytes())
                    weakref.finalize(storage, self._give, storage._cdata)
        return out

    @property
    def reserved(self) -> int:
        return sum(block.size for block in self._blocks)

    @property
    def allocated(self) -> int:
        return sum(piece.size for _, piece in self._live.values())

    def _take(self, size: int) -> tuple[Block, Piece]:
        size = -(-size // GRAIN) * GRAIN
        small = size <= SMALL
        own = [block for block in self._blocks if block.small == small and block.captured == self._capturing]
        free = [(b, p) for b in own for p in b.pieces if not p.used and p.size >= size]
        if not free:
            wants = SMALL_BLOCK if small else MEDIUM_BLOCK if size < MEDIUM else -(-size // ROUND) * ROUND
            if self.beside + self.reserved + wants > self.total_bytes and not self._capturing:
                self._release()
            if self.beside + self.reserved + wants > self.total_bytes:
                raise DeviceMemoryError(f"{size} bytes asked, {self.total_bytes - self.beside - self.reserved} free")
            block = Block(wants, small, [Piece(wants)], self._capturing)
            self._blocks.append(block)
            self._peak = max(self._peak, self.reserved)
            self.most = max(self.most, self.beside + self.reserved)
            free = [(block, block.pieces[0])]
        block, piece = min(free, key=lambda one: one[1].size)
        if (rest := piece.size - size) >= (GRAIN if small else SMALL):
            block.pieces.insert(block.pieces.index(piece) + 1, Piece(rest))
            piece.size = size
        piece.used = True
        return block, piece

    def _give(self, key: int) -> None:
        block, piece = self._live.pop(key)
        piece.used = False
        at = block.pieces.index(piece)
        for neighbour in (at + 1, at - 1):
            if 0 <= neighbour < len(block.pieces) and not block.pieces[neighbour].used:
                piece.size += block.pieces[neighbour].size
                del block.pieces[neighbour]

    def _release(self) -> None:
        self._blocks = [block for block in self._blocks if block.captured or any(p.used for p in block.pieces)]

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """What is made here lies in the memory of programs, which nobody else gets, used or not; meanwhile nothing is
        given back.
        """
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    def free_bytes(self) -> int:
        gc.collect()
        self._release()
        return self.total_bytes - self.beside - self.reserved

    def reset_peak(self) -> None:
        self.free_bytes()
        self._held = self._peak = self.reserved

    def peak_bytes(self) -> int:
        return self._peak - self._held
