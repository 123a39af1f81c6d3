"""Memory for what a tape's program makes: what it is done with is lent anew to whatever it makes next.

While a program runs for the first time, tensors that it drops free their memory, which is in a near cache when it is
used again. A tape makes the same calls on the same memory, so it can have that too: what was dropped before a call is
dropped before that call in every replay.
"""

import ctypes
import weakref
from bisect import bisect_left, insort
from collections import defaultdict

import torch
from torch import Tensor

WIDEST = 2  # a buffer is lent for no less than a half of its numbers


class Buffers:
    """Lends tensors, each for as long as anything holds it or a view of it.

    The memory itself stays: calls that were told of an address find it at any time. Tapes that never run at the same
    time can share it.
    """

    def __init__(self) -> None:
        self._free: defaultdict[torch.dtype, list[tuple[int, int]]] = defaultdict(list)
        self._made: list[Tensor] = []
        self._lent: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """Memory of all buffers."""
        return sum(buffer.nbytes for buffer in self._made)

    def lend(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """A tensor with the size and strides of `like`, whose numbers are whatever lies there, and its whole buffer."""
        which = self._taken(like.untyped_storage().nbytes() // like.itemsize, like.dtype)
        buffer = self._made[which]
        held = (ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr())
        lent = torch.frombuffer(held, dtype=like.dtype)
        place = lent.untyped_storage()._cdata
        self._lent[place] = which
        weakref.finalize(held, self._back, place).atexit = False
        return lent.as_strided(like.size(), like.stride()), buffer

    def lasting(self, tensor: Tensor) -> Tensor:
        """The same numbers as `tensor`, but holding it does not keep them lent; `tensor` itself if they never were."""
        which = self._lent.get(tensor.untyped_storage()._cdata)
        if which is None:
            return tensor
        place = self._made[which].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(place, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _taken(self, numbers: int, dtype: torch.dtype) -> int:
        """The smallest free buffer that fits, or a new one."""
        free = self._free[dtype]
        at = bisect_left(free, (numbers, 0))
        found, which = free.pop(at) if at < len(free) else (0, 0)
        if numbers <= found <= WIDEST * numbers:
            return which
        if found:  # too large; or garbage was collected meanwhile, which may give buffers back and move others
            insort(free, (found, which))
        self._made.append(torch.empty(numbers, dtype=dtype))
        return len(self._made) - 1

    def _back(self, place: int) -> None:
        which = self._lent.pop(place)
        insort(self._free[self._made[which].dtype], (self._made[which].numel(), which))
