"""Loading a rank in a thread that does not outlive it."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_a_thread_that_ends(call: Callable[[], T]) -> T:
    """What `call` returns or raises, in a thread that has ended by then.

    Each thread that computes gets threads of its own from OpenMP, which live as long as it does. If those of the thread
    that loaded stayed, the process would have more of them than cores, and GNU's OpenMP then lets no thread spin while
    it waits: every kernel of a step would begin by waking the others through the system. An exit of the process does
    not wait for the thread.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    return found.result()
