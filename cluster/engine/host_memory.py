"""Makes the host's allocator keep the memory that a step has freed, for the next step.

The tensors of a step are freed at its end, and the next step needs the same amount of memory. By default the GNU C
library returns free memory at the end of its heap to the system, which must then clear thousands of pages in each step
of many rows.
"""

import ctypes
import os

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # parameters of mallopt(3)
CACHED_BYTES = 1 << 28
HEAP_BYTES = 1 << 26  # largest heap of other threads; with a smaller TOP_PAD the library would return free heaps
MAX_MMAP_THRESHOLD = 1 << 25  # the largest MMAP_THRESHOLD that the library accepts


def cache_freed_memory() -> bool:
    """Make this process keep up to `CACHED_BYTES` of freed memory, in blocks of up to `MAX_MMAP_THRESHOLD`, for later
    use.

    Returns False if nothing was changed: the allocator is not the GNU C library's, or environment variables set it up.
    """
    configured = any(name.startswith("MALLOC_") for name in os.environ)
    if configured or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    settings = {TRIM_THRESHOLD: CACHED_BYTES, TOP_PAD: HEAP_BYTES, MMAP_THRESHOLD: MAX_MMAP_THRESHOLD}
    return mallopt is not None and all(mallopt(setting, value) for setting, value in settings.items())
