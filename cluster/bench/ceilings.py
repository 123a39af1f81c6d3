"""What a machine can do at most: bytes read and floating-point operations a second, measured now."""

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
    """`bytes` read from memory a second, and `flops`, those of torch's own product of two square matrices."""

    bytes: float
    flops: float

    def least_seconds(self, read: float, computed: float) -> float:
        """In what time that many bytes are read and that many operations done at best, both at once."""
        return max(read / self.bytes, computed / self.flops)

    def best(self, other: "Ceilings") -> "Ceilings":
        """The higher of both: a ceiling is not a mean."""
        return Ceilings(max(self.bytes, other.bytes), max(self.flops, other.flops))


@dataclass(frozen=True, slots=True)
class Tried:
    """What ceilings are measured with: numbers that no cache holds, and matrices of that many rows and columns."""

    read_bytes: int
    side: int


TRIED = {"cpu": Tried(1 << 28, 1536), "cuda": Tried(1 << 32, 8192)}


def ceilings(repeats: int = 5, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Ceilings:
    """Those of a device, by all threads that torch has now; the best of some tries, the first left out.

    Products are those of `dtype`; on a CPU also of float32, as which numbers of 16 bits are often multiplied.
    """
    tried = TRIED[device.type]
    memory = torch.ones(tried.read_bytes // 4, device=device)
    read = best_seconds(memory.sum, device, repeats)
    del memory
    flops = []
    for kind in {dtype, torch.float32} if device.type == "cpu" else {dtype}:
        square = torch.randn(tried.side, tried.side, device=device).to(kind)  # zeros and ones would need less power
        flops.append(2 * tried.side**3 / best_seconds(partial(torch.mm, square, square), device, repeats))
    return Ceilings(tried.read_bytes / read, max(flops))


def best_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The least that `work` takes of a device, of `repeats` times after a first one."""
    timer = timer_of(device)
    moments = [timer.now()]
    for _ in range(repeats + 1):
        work()
        moments.append(timer.now())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return min(timer.between(*span) for span in pairwise(moments[1:]))


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
