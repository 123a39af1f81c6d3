"""A simulated device with limited memory, on a CPU.

While `SimulatedMemory` is entered as a context manager, every new torch tensor is allocated from its memory.

It fragments like CUDA's caching allocator (pytorch, c10/cuda/CUDACachingAllocator.cpp): it takes memory from the device
in blocks of fixed sizes, splits blocks, never moves data, and returns a block only when all pieces of the block are
unused. The sizes are those of CUDA divided by `SCALE`, because the models of the tests are small; the smallest piece is
divided by 32. Memory that an operator allocates and frees inside itself is not counted.
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
MIN_BLOCK_SIZE = 512 // 32
SMALL_SIZE, MIN_LARGE_ALLOC = (1 << 20) // SCALE, 10 * (1 << 20) // SCALE
SMALL_BUFFER, LARGE_BUFFER, ROUND_LARGE = (2 << 20) // SCALE, (20 << 20) // SCALE, (2 << 20) // SCALE


@dataclass(eq=False)
class Piece:
    """A part of a block, or all of it."""

    size: int
    used: bool = False


@dataclass(eq=False)
class Block:
    """A contiguous memory area that was taken from the device in one request."""

    size: int
    small: bool
    pieces: list[Piece] = field(default_factory=list)
    captured: bool = False


class SimulatedMemory(TorchDispatchMode):
    """A `DeviceMemory` of `total_bytes`.

    Other processes use `other_bytes` of it. `peak_total_bytes` is the largest number of bytes that this process and
    the others ever used at the same time.
    """

    def __init__(self, total_bytes: int, other_bytes: int = 0) -> None:
        super().__init__()
        self.total_bytes, self.other_bytes, self.peak_total_bytes = total_bytes, other_bytes, other_bytes
        self._blocks: list[Block] = []
        self._live: dict[int, tuple[Block, Piece]] = {}
        self._reserved_at_reset = self._peak_reserved = 0
        self._capturing = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        input_storages = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                if storage._cdata not in input_storages and storage._cdata not in self._live and storage.nbytes():
                    self._live[storage._cdata] = self._allocate(storage.nbytes())
                    weakref.finalize(storage, self._free, storage._cdata)
        return result

    @property
    def reserved(self) -> int:
        return sum(block.size for block in self._blocks)

    @property
    def allocated(self) -> int:
        return sum(piece.size for _, piece in self._live.values())

    def _allocate(self, size: int) -> tuple[Block, Piece]:
        size = -(-size // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE
        small = size <= SMALL_SIZE
        candidates = [block for block in self._blocks if block.small == small and block.captured == self._capturing]
        free_pieces = [(b, p) for b in candidates for p in b.pieces if not p.used and p.size >= size]
        if not free_pieces:
            block_size = (
                SMALL_BUFFER
                if small
                else LARGE_BUFFER
                if size < MIN_LARGE_ALLOC
                else -(-size // ROUND_LARGE) * ROUND_LARGE
            )
            if self.other_bytes + self.reserved + block_size > self.total_bytes and not self._capturing:
                self._release_unused_blocks()
            if self.other_bytes + self.reserved + block_size > self.total_bytes:
                raise DeviceMemoryError(
                    f"{size} bytes asked, {self.total_bytes - self.other_bytes - self.reserved} free"
                )
            block = Block(block_size, small, [Piece(block_size)], self._capturing)
            self._blocks.append(block)
            self._peak_reserved = max(self._peak_reserved, self.reserved)
            self.peak_total_bytes = max(self.peak_total_bytes, self.other_bytes + self.reserved)
            free_pieces = [(block, block.pieces[0])]
        block, piece = min(free_pieces, key=lambda free_piece: free_piece[1].size)
        if (rest := piece.size - size) >= (MIN_BLOCK_SIZE if small else SMALL_SIZE):
            block.pieces.insert(block.pieces.index(piece) + 1, Piece(rest))
            piece.size = size
        piece.used = True
        return block, piece

    def _free(self, key: int) -> None:
        block, piece = self._live.pop(key)
        piece.used = False
        index = block.pieces.index(piece)
        for neighbour in (index + 1, index - 1):
            if 0 <= neighbour < len(block.pieces) and not block.pieces[neighbour].used:
                piece.size += block.pieces[neighbour].size
                del block.pieces[neighbour]

    def _release_unused_blocks(self) -> None:
        self._blocks = [block for block in self._blocks if block.captured or any(p.used for p in block.pieces)]

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Simulate the capture of a program.

        Tensors that are made inside the block lie in blocks that only captured programs use, even when the blocks
        are free. Inside the block, no block is returned to the device.
        """
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    def free_bytes(self) -> int:
        gc.collect()
        self._release_unused_blocks()
        return self.total_bytes - self.other_bytes - self.reserved

    def reset_peak(self) -> None:
        self.free_bytes()
        self._reserved_at_reset = self._peak_reserved = self.reserved

    def peak_bytes(self) -> int:
        return self._peak_reserved - self._reserved_at_reset
