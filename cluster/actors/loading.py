"""Loading a rank in a thread that does not outlive it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_a_thread_that_ends(call: Callable[[], T]) -> T:
    """What `call` returns or raises, in a thread that has ended by then.

    Each thread that computes gets threads of its own from OpenMP, which live as long as it does. If those of the thread
    that loaded stayed, the process would have more of them than cores, and GNU's OpenMP then lets no thread spin while
    it waits: every kernel of a step would begin by waking the others through the system.
    """
    with ThreadPoolExecutor(1) as one:
        return one.submit(call).result()
