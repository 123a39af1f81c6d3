"""The measured ceilings of a machine: bytes read per second and floating-point operations per second."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from cluster.device.timing import timer_of

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Ceilings:
    """`bytes` read from memory per second, and `flops` per second of torch's product of two square matrices."""

    bytes: float
    flops: float

    def least_seconds(self, read: float, computed: float) -> float:
        """Return the least time to read `read` bytes and do `computed` operations, if both overlap completely."""
        return max(read / self.bytes, computed / self.flops)

    def best(self, other: "Ceilings") -> "Ceilings":
        """Return the higher value of each ceiling: interference only lowers a measured ceiling."""
        return Ceilings(max(self.bytes, other.bytes), max(self.flops, other.flops))


@dataclass(frozen=True, slots=True)
class Tried:
    """The sizes to measure ceilings with: bytes of an array too large for any cache, and rows of a square matrix."""

    read_bytes: int
    side: int


TRIED = {"cpu": Tried(1 << 28, 1536), "cuda": Tried(1 << 32, 8192)}


def ceilings(repeats: int = 5, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Ceilings:
    """Measure a device's ceilings with torch's current threads: the best of `repeats` runs after a warm-up.

    Matrices are multiplied in `dtype`. On a CPU float32 is tried too, because CPUs often multiply 16-bit numbers as
    float32.
    """
    tried = TRIED[device.type]
    memory = torch.ones(tried.read_bytes // 4, device=device)
    read = best_seconds(memory.sum, device, repeats)
    del memory
    flops = []
    for kind in {dtype, torch.float32} if device.type == "cpu" else {dtype}:
        square = torch.randn(tried.side, tried.side, device=device).to(kind)  # constants would draw less power
        flops.append(2 * tried.side**3 / best_seconds(partial(torch.mm, square, square), device, repeats))
    return Ceilings(tried.read_bytes / read, max(flops))


def best_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the least time of `work` on the device, over `repeats` runs after a warm-up."""
    timer = timer_of(device)
    moments = [timer.now()]
    for _ in range(repeats + 1):
        work()
        moments.append(timer.now())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return min(timer.between(*span) for span in pairwise(moments[1:]))


def timed(work: Callable[[], object]) -> float:
    """Run `work` once and return its seconds by the host's clock."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
