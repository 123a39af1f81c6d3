"""A small thread pool for work that takes too long for the event loop; what many clients send waits there in line.

The event loop carries every stream of the replica. Long input is worked on here instead, by so few threads that the
streams still get most of the GIL.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

INLINE_CHARACTERS = 2048  # up to so many characters or bytes, work is done on the event loop: well under a millisecond
THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))
_POOL = ThreadPoolExecutor(THREADS, thread_name_prefix="offload")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """The result of `work` over `size` characters or bytes; in a thread when there are many of them."""
    if size <= INLINE_CHARACTERS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_POOL, work)
