"""What the host's allocator does with memory that a step has freed.

A step's tensors are freed when it ends, and the next one asks for as much. The GNU C library gives what is free at the
end of its memory back to the system, which then clears thousands of pages in every step of many rows.
"""

import ctypes
import os

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)
KEPT_BYTES = 1 << 28
HEAP_BYTES = 1 << 26  # the most in one heap of a thread that is not the first; with less as padding, free heaps go back
LARGEST_PIECE = 1 << 25  # the most that the library takes for a threshold


def keep_freed() -> bool:
    """Have this process keep up to `KEPT_BYTES` of freed memory, in pieces up to `LARGEST_PIECE`, for what follows.

    False: it does as before, because the allocator is not the GNU C library's, or the environment says what to do.
    """
    named = any(name.startswith("MALLOC_") for name in os.environ)
    if named or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    settings = {TRIM_THRESHOLD: KEPT_BYTES, TOP_PAD: HEAP_BYTES, MMAP_THRESHOLD: LARGEST_PIECE}
    return mallopt is not None and all(mallopt(setting, value) for setting, value in settings.items())
