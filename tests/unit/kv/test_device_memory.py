"""The memory of a GPU as `torch.cuda` reports it. `torch.cuda` is faked here."""

import pytest
import torch

from cluster.kv.device_memory import CudaMemory, memory_of

GPU = torch.device("cuda")


class FakeCuda:
    """A fake `torch.cuda` of a device with 1000 bytes. torch has taken `reserved` bytes, and can return `releasable` of
    these; `outside_torch` bytes are taken by others.
    """

    reserved, releasable, peak_reserved, outside_torch = 300, 100, 400, 50

    def synchronize(self, _: torch.device) -> None:
        pass

    def empty_cache(self) -> None:
        self.reserved, self.releasable = self.reserved - self.releasable, 0

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        return 1000 - self.reserved - self.outside_torch, 1000

    def memory_reserved(self, _: torch.device) -> int:
        return self.reserved

    def max_memory_reserved(self, _: torch.device) -> int:
        return self.peak_reserved

    def reset_peak_memory_stats(self, _: torch.device) -> None:
        self.peak_reserved = self.reserved


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("synchronize", "empty_cache", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    for name in ("memory_reserved", "max_memory_reserved", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_cuda_memory_counts_torch_cache_as_free_and_measures_the_peak(cuda: FakeCuda) -> None:
    memory = memory_of(GPU)
    assert isinstance(memory, CudaMemory) and memory.total_bytes == 1000
    assert memory.free_bytes() == 750
    cuda.reserved, cuda.releasable = 260, 60
    memory.reset_peak()
    assert memory.peak_bytes() == 0, "reset_peak must forget the earlier peak"
    cuda.reserved, cuda.releasable, cuda.peak_reserved = 230, 30, 290
    assert memory.peak_bytes() == 90


def test_cuda_peak_counts_memory_taken_outside_torch_but_not_memory_freed_there(cuda: FakeCuda) -> None:
    memory = CudaMemory(GPU)
    memory.reset_peak()
    cuda.outside_torch = 80
    assert memory.peak_bytes() == 30
    cuda.outside_torch = 20
    assert memory.peak_bytes() == 0


def test_cpu_has_no_device_memory() -> None:
    assert memory_of(torch.device("cpu")) is None
