"""The memory of a device: how much is free, and how much was taken at most while something ran.

What counts is what the device's allocator takes from the device, not what tensors need: it takes memory in large blocks
and keeps what it cannot fill. Collectives, matrix libraries and other processes take memory beside it.
"""

import gc
from typing import Protocol

import torch


class DeviceMemoryError(RuntimeError):
    """More was asked of a simulated device than it has; a real one raises `torch.OutOfMemoryError`."""


OUT_OF_MEMORY = torch.OutOfMemoryError, DeviceMemoryError


class DeviceMemory(Protocol):
    """One device, as one process sees it. All sizes are bytes."""

    @property
    def total(self) -> int:
        """What the device has."""
        ...

    def free(self) -> int:
        """What this process can still take, after it has given back what its allocator holds and nobody uses. Memory of
        captured programs is theirs, though nothing in it counts as used.
        """
        ...

    def begin(self) -> None:
        """Give back what nobody uses, and forget the peak."""
        ...

    def taken(self) -> int:
        """What was taken at most since `begin`, beyond what was held then."""
        ...


class CudaMemory:
    """The memory of a GPU. Has not run on one yet."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._held, self._beside = device, 0, 0

    @property
    def total(self) -> int:
        """See `DeviceMemory.total`."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """See `DeviceMemory.free`."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def begin(self) -> None:
        """See `DeviceMemory.begin`."""
        used = self.total - self.free()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._held = torch.cuda.memory_reserved(self._device)
        self._beside = used - self._held

    def taken(self) -> int:
        """See `DeviceMemory.taken`; what was taken beside torch's allocator counts as it is now."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        beside = total - free - torch.cuda.memory_reserved(self._device)
        return torch.cuda.max_memory_reserved(self._device) - self._held + max(0, beside - self._beside)


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory of a device of its own; None for a CPU, whose memory is the machine's and taken as it is written."""
    return CudaMemory(device) if device.type == "cuda" else None
