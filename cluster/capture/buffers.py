"""Buffers of a captured program. A freed buffer is reused by later operators of the same program and by other programs.

Reuse keeps the working set small, so a reused buffer is often still in a CPU cache. It is safe because a tape repeats
the same calls in the same order: a tensor that was freed before a call is also unused at that call in every replay.
"""

import ctypes
import weakref
from bisect import bisect_left, insort
from collections import defaultdict

import torch
from torch import Tensor

WIDEST = 2  # a buffer is lent only if it is at most this many times as large as needed


class Buffers:
    """Lends tensors. A tensor's buffer becomes free when nothing refers to the tensor or a view of it any more.

    The memory itself is never released, so recorded calls may keep raw addresses. Tapes that never run at the same time
    may share one `Buffers`.
    """

    def __init__(self) -> None:
        self._free: defaultdict[torch.dtype, list[tuple[int, int]]] = defaultdict(list)
        self._made: list[Tensor] = []
        self._lent: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """The memory of all buffers, lent or free."""
        return sum(buffer.nbytes for buffer in self._made)

    def lend(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return an uninitialised tensor with the size, strides and dtype of `like`, and the buffer that it lies in."""
        which = self._taken(like.untyped_storage().nbytes() // like.itemsize, like.dtype)
        buffer = self._made[which]
        # The tensor keeps `held` alive, so the finalizer of `held` runs when the last view of the tensor is gone.
        held = (ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr())
        lent = torch.frombuffer(held, dtype=like.dtype)
        place = lent.untyped_storage()._cdata
        self._lent[place] = which
        weakref.finalize(held, self._back, place).atexit = False
        return lent.as_strided(like.size(), like.stride()), buffer

    def lasting(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the same memory that does not keep its buffer lent; `tensor` itself if none is lent."""
        which = self._lent.get(tensor.untyped_storage()._cdata)
        if which is None:
            return tensor
        place = self._made[which].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(place, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _taken(self, numbers: int, dtype: torch.dtype) -> int:
        """Return the index of the smallest free buffer that fits, or of a new one."""
        free = self._free[dtype]
        at = bisect_left(free, (numbers, 0))
        found, which = free.pop(at) if at < len(free) else (0, 0)
        if numbers <= found <= WIDEST * numbers:
            return which
        # Put back one that is too large. It may also be too small: a garbage collection between the bisection and the
        # pop frees buffers, which shifts the list.
        if found:
            insort(free, (found, which))
        self._made.append(torch.empty(numbers, dtype=dtype))
        return len(self._made) - 1

    def _back(self, place: int) -> None:
        which = self._lent.pop(place)
        insort(self._free[self._made[which].dtype], (self._made[which].numel(), which))
