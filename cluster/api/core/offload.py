"""A small thread pool for work that takes too long for the event loop, such as encoding long prompts.

The event loop serves every stream of the replica. The pool has few threads, so that the streams still get most of the
GIL; further work waits in the pool's queue.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

INLINE_CHARACTERS = 2048  # work on at most this many characters or bytes runs on the event loop: well under 1 ms
THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))
_POOL = ThreadPoolExecutor(THREADS, thread_name_prefix="offload")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, run in a thread if `size`, the input's length, exceeds `INLINE_CHARACTERS`."""
    if size <= INLINE_CHARACTERS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_POOL, work)
