"""Loads a rank in a thread that ends with the loading."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_a_thread_that_ends(call: Callable[[], T]) -> T:
    """Run `call` in a thread that has ended when this returns; return its result or raise its error.

    OpenMP gives each computing thread a team of its own, which lives as long as the thread. If the team of the loading
    thread stayed, the process would have more OpenMP threads than cores. GNU's OpenMP then does not let waiting threads
    spin: every kernel of a step would first wake the others by system calls. The thread is a daemon, so an exit of the
    process does not wait for it.
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
