"""Device memory: how much is free, and the peak that was used while something ran.

These numbers count the memory that the allocator takes from the device, not the sizes of tensors: the allocator takes
large blocks, and keeps the parts that it cannot fill. Collectives, matrix libraries and other processes take memory
outside the allocator.
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
    def total_bytes(self) -> int:
        """The memory of the device."""

    def free_bytes(self) -> int:
        """Release the allocator's unused blocks, then return what this process can still take. The memory of captured
        programs stays in use, although their tensors may be freed.
        """

    def reset_peak(self) -> None:
        """Release the allocator's unused blocks and reset the peak."""

    def peak_bytes(self) -> int:
        """Return the peak of the memory in use since the last `reset_peak`, less what was in use at that call."""


class CudaMemory:
    """The memory of a GPU. This class has not been tested on a GPU whose memory is nearly full."""

    def __init__(self, device: torch.device) -> None:
        # At `reset_peak`: bytes reserved by torch's allocator, and bytes used outside it.
        self._device, self._reserved_before, self._outside_before = device, 0, 0

    @property
    def total_bytes(self) -> int:
        """The memory of the GPU."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        """Empty torch's cache, then return the GPU's free memory."""
        gc.collect()  # tensors in reference cycles would keep their blocks
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def reset_peak(self) -> None:
        """Empty torch's cache, reset the peak, and note what is in use."""
        used_bytes = self.total_bytes - self.free_bytes()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._reserved_before = torch.cuda.memory_reserved(self._device)
        self._outside_before = used_bytes - self._reserved_before

    def peak_bytes(self) -> int:
        """See `DeviceMemory.peak_bytes`. For memory outside torch's allocator no peak is known; its present use is
        taken instead.
        """
        torch.cuda.synchronize(self._device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        outside = total_bytes - free_bytes - torch.cuda.memory_reserved(self._device)
        return (
            torch.cuda.max_memory_reserved(self._device)
            - self._reserved_before
            + max(0, outside - self._outside_before)
        )


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a GPU; None for a CPU, whose memory is that of the machine."""
    return CudaMemory(device) if device.type == "cuda" else None
