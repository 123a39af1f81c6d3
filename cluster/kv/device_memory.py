"""Device memory: how much is free, and the peak that was taken while something ran.

Counted is the memory that the allocator takes from the device, not the sizes of tensors: the allocator takes large
blocks, and keeps the parts that it cannot fill. Collectives, matrix libraries and other processes take memory outside
the allocator.
"""

import gc
from typing import Protocol

import torch


class DeviceMemoryError(RuntimeError):
    """Out of memory on a simulated device. A real device raises `torch.OutOfMemoryError`."""


OUT_OF_MEMORY = torch.OutOfMemoryError, DeviceMemoryError


class DeviceMemory(Protocol):
    """The memory of one device, as one process sees it. All sizes are bytes."""

    @property
    def total(self) -> int:
        """The memory of the device."""

    def free(self) -> int:
        """Release the allocator's unused blocks, then return what this process can still take. The memory of captured
        programs stays taken, although their tensors may be freed.
        """

    def begin(self) -> None:
        """Release the allocator's unused blocks and reset the peak."""

    def taken(self) -> int:
        """The peak of the memory in use since `begin`, minus the memory in use at `begin`."""


class CudaMemory:
    """The memory of a GPU. Not yet tested on a GPU near its limit."""

    def __init__(self, device: torch.device) -> None:
        # At `begin`: bytes reserved by torch's allocator, and bytes used outside it.
        self._device, self._held, self._beside = device, 0, 0

    @property
    def total(self) -> int:
        """The memory of the GPU."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """Empty torch's cache, then return the GPU's free memory."""
        gc.collect()  # tensors in reference cycles would keep their blocks
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def begin(self) -> None:
        """Empty torch's cache, reset the peak, and note what is in use."""
        used = self.total - self.free()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._held = torch.cuda.memory_reserved(self._device)
        self._beside = used - self._held

    def taken(self) -> int:
        """The peak since `begin`. Outside torch's allocator no peak is known, so the present use counts instead."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        beside = total - free - torch.cuda.memory_reserved(self._device)
        return torch.cuda.max_memory_reserved(self._device) - self._held + max(0, beside - self._beside)


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a GPU; None for a CPU, whose memory is that of the machine."""
    return CudaMemory(device) if device.type == "cuda" else None
