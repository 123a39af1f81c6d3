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
    """Bytes read from memory per second, and operations per second while torch multiplies two square matrices."""

    bytes_per_s: float
    flops_per_s: float

    def least_seconds(self, bytes_read: float, operations: float) -> float:
        """Return the least seconds to read the bytes and to do the operations, if both overlap completely."""
        return max(bytes_read / self.bytes_per_s, operations / self.flops_per_s)

    def highest(self, other: "Ceilings") -> "Ceilings":
        """Return the higher value of each ceiling, because other load can only lower a measured ceiling."""
        return Ceilings(max(self.bytes_per_s, other.bytes_per_s), max(self.flops_per_s, other.flops_per_s))


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    """The sizes to measure ceilings with: bytes of an array larger than usual caches, and rows of a square matrix."""

    read_bytes: int
    matrix_side: int


PROBE_SIZES = {"cpu": ProbeSizes(1 << 28, 1536), "cuda": ProbeSizes(1 << 32, 8192)}


def measure_ceilings(repeats: int = 5, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Ceilings:
    """Measure a device's ceilings with torch's current threads: the best of `repeats` runs after a warm-up.

    Matrices are multiplied in `dtype`. On a CPU float32 is tried too, and the faster of both counts, because CPUs often
    multiply 16-bit numbers as float32.
    """
    sizes = PROBE_SIZES[device.type]
    memory = torch.ones(sizes.read_bytes // 4, device=device)
    read_seconds = best_seconds(memory.sum, device, repeats)
    del memory
    flops = []
    for compute_dtype in {dtype, torch.float32} if device.type == "cpu" else {dtype}:
        # Random numbers: a product of constants would draw less power, so a GPU might run at a higher clock rate.
        matrix = torch.randn(sizes.matrix_side, sizes.matrix_side, device=device).to(compute_dtype)
        flops.append(2 * sizes.matrix_side**3 / best_seconds(partial(torch.mm, matrix, matrix), device, repeats))
    return Ceilings(sizes.read_bytes / read_seconds, max(flops))


def best_seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the least seconds that `call` takes on the device, over `repeats` runs after a warm-up."""
    timer = timer_of(device)
    timestamps = [timer.now()]
    for _ in range(repeats + 1):
        call()
        timestamps.append(timer.now())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return min(timer.between(*span) for span in pairwise(timestamps[1:]))


def call_seconds(call: Callable[[], object]) -> float:
    """Run `call` once and return its seconds by the host's clock."""
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at
