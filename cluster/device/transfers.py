"""Asynchronous copies between host and device, through pinned memory.

No ring of buffers is needed: torch's pinned allocator reuses a block only when its tensor is gone and the device has
finished every copy that was queued with it. So a copy in flight is never overwritten, however far ahead the host is.
Pinning new memory is slow; it happens only if no free block of the right size class is left.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def copy_to_device(host_tensor: Tensor, device: torch.device) -> Tensor:
    """Queue a copy of `host_tensor` to the device, and return the tensor on the device. On a CPU return `host_tensor`
    itself.
    """
    if device.type != "cuda":
        return host_tensor
    return host_tensor.pin_memory().to(device, non_blocking=True)


class HostCopies:
    """Queued copies of tensors to the host. The copies hold the values after all work that was queued before them; work
    that is queued later does not change them. On a CPU nothing is copied: `wait` returns the given tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Queue the copies, and an event after them."""
        self._tensors, self._event = list(tensors), None
        if any(tensor.is_cuda for tensor in tensors):
            self._tensors = [_copy_to_pinned(tensor) for tensor in tensors]
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._event = event

    def wait(self) -> list[Tensor]:
        """Wait for the copies; return the host tensors in the order given."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _copy_to_pinned(tensor: Tensor) -> Tensor:
    host_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host_tensor.copy_(tensor.contiguous(), non_blocking=True)
