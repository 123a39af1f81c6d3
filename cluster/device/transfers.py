"""What crosses between the host and a device that runs behind it: copies that nobody waits for, by pinned memory.

Torch's allocator of pinned memory is the ring: a block is its tensor's as long as that is held, and afterwards nobody's
before the device has passed every copy that was queued with it. So no copy under way is overwritten, however far the
host is ahead, and a block that is free again is used again without asking the driver.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def brought(numbers: Tensor, device: torch.device) -> Tensor:
    """The host's `numbers` on the device, behind all work that was queued so far; on a CPU they are there already."""
    if device.type != "cuda":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


class Landing:
    """Tensors on their way to the host: as they are when the device has done what was queued so far, whatever is queued
    later. On a CPU that is now, and nothing is copied.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Queue the copies."""
        self._tensors, self._event = list(tensors), None
        if any(one.is_cuda for one in tensors):
            self._tensors = [_pinned(one) for one in tensors]
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._event = event

    def wait(self) -> list[Tensor]:
        """Wait until they have come; they are in the order in which they were given."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _pinned(tensor: Tensor) -> Tensor:
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor.contiguous(), non_blocking=True)
