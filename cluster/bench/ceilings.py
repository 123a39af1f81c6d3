"""What this machine can do at most: bytes read and floating-point operations a second, measured now."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

READ_BYTES = 1 << 28
SIDE = 1536


@dataclass(frozen=True, slots=True)
class Ceilings:
    """`bytes` read from memory a second, and `flops`, those of torch's own product of float32 matrices."""

    bytes: float
    flops: float

    def least_seconds(self, read: float, computed: float) -> float:
        """In what time that many bytes are read and that many operations done at best, both at once."""
        return max(read / self.bytes, computed / self.flops)


def ceilings(repeats: int = 5) -> Ceilings:
    """Those of all threads that torch has now; the best of some tries, as a ceiling is not a mean."""
    memory, square = torch.ones(READ_BYTES // 4), torch.ones(SIDE, SIDE)
    read = min(timed(lambda: memory.sum()) for _ in range(repeats))
    computed = min(timed(lambda: torch.mm(square, square)) for _ in range(repeats))
    return Ceilings(READ_BYTES / read, 2 * SIDE**3 / computed)


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
