"""A GPU's memory by what torch's CUDA side says of it, which here is made up."""

import pytest
import torch

from cluster.kv.device_memory import CudaMemory, memory_of

GPU = torch.device("cuda")


class Cuda:
    """`torch.cuda` of a device of 1000 bytes: `cached` of `reserved` can be given back; `others` are not torch's."""

    reserved, cached, peak, others = 300, 100, 400, 50

    def synchronize(self, _: torch.device) -> None:
        pass

    def empty_cache(self) -> None:
        self.reserved, self.cached = self.reserved - self.cached, 0

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        return 1000 - self.reserved - self.others, 1000

    def memory_reserved(self, _: torch.device) -> int:
        return self.reserved

    def max_memory_reserved(self, _: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, _: torch.device) -> None:
        self.peak = self.reserved


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    for name in ("synchronize", "empty_cache", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    for name in ("memory_reserved", "max_memory_reserved", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


def test_cuda_memory_counts_torch_cache_as_free_and_measures_the_peak(cuda: Cuda) -> None:
    memory = memory_of(GPU)
    assert isinstance(memory, CudaMemory) and memory.total_bytes == 1000
    assert memory.free_bytes() == 750
    cuda.reserved, cuda.cached = 260, 60
    memory.reset_peak()
    assert memory.peak_bytes() == 0, "the peak of what came before is forgotten"
    cuda.reserved, cuda.cached, cuda.peak = 230, 30, 290
    assert memory.peak_bytes() == 90


def test_cuda_peak_counts_memory_taken_outside_torch_but_not_memory_freed_there(cuda: Cuda) -> None:
    memory = CudaMemory(GPU)
    memory.reset_peak()
    cuda.others = 80
    assert memory.peak_bytes() == 30
    cuda.others = 20
    assert memory.peak_bytes() == 0


def test_cpu_has_no_device_memory() -> None:
    assert memory_of(torch.device("cpu")) is None
