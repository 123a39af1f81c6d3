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

MAX_SIZE_RATIO = 2  # a buffer is lent only if it is at most this many times as large as needed


class Buffers:
    """Lends tensors. A tensor's buffer becomes free when nothing refers to the tensor or a view of it any more.

    The memory itself is never released, so recorded calls may keep raw addresses. Tapes that never run at the same time
    may share one `Buffers`.
    """

    def __init__(self) -> None:
        self._free: defaultdict[torch.dtype, list[tuple[int, int]]] = defaultdict(list)
        self._buffers: list[Tensor] = []
        self._lent_buffers: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """The memory of all buffers, lent or free."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def lend(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return an uninitialised tensor with the size, strides and dtype of `like`, and the buffer that it lies in."""
        index = self._free_buffer_index(like.untyped_storage().nbytes() // like.itemsize, like.dtype)
        buffer = self._buffers[index]
        # The tensor and its views keep `memory_owner` alive. So the finalizer of `memory_owner`, which gives the buffer
        # back, runs when all of them are gone.
        memory_owner = (ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr())
        lent_tensor = torch.frombuffer(memory_owner, dtype=like.dtype)
        storage_id = lent_tensor.untyped_storage()._cdata
        self._lent_buffers[storage_id] = index
        weakref.finalize(memory_owner, self._give_back, storage_id).atexit = False
        return lent_tensor.as_strided(like.size(), like.stride()), buffer

    def unowned_view(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the memory of `tensor` that does not keep the buffer lent: the buffer can become free
        while the returned tensor exists. If `tensor` does not lie in a lent buffer, return `tensor` itself.
        """
        index = self._lent_buffers.get(tensor.untyped_storage()._cdata)
        if index is None:
            return tensor
        storage = self._buffers[index].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _free_buffer_index(self, needed_size: int, dtype: torch.dtype) -> int:
        """Return the index of the smallest free buffer that has at least `needed_size` numbers and is not too large
        (`MAX_SIZE_RATIO`). If there is none, allocate a buffer and return its index.
        """
        free = self._free[dtype]
        position = bisect_left(free, (needed_size, 0))
        size, index = free.pop(position) if position < len(free) else (0, 0)
        if needed_size <= size <= MAX_SIZE_RATIO * needed_size:
            return index
        # Put back a buffer that is too large. It may be too small, too: a garbage collection between the bisection and
        # the pop may free buffers, which shifts the list.
        if size:
            insort(free, (size, index))
        self._buffers.append(torch.empty(needed_size, dtype=dtype))
        return len(self._buffers) - 1

    def _give_back(self, storage_id: int) -> None:
        index = self._lent_buffers.pop(storage_id)
        insort(self._free[self._buffers[index].dtype], (self._buffers[index].numel(), index))
