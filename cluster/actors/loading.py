"""Loads a rank in a thread that ends with the loading."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def run_in_temporary_thread(call: Callable[[], T]) -> T:
    """Run `call` in a thread that has ended when this returns; return its result or raise its error.

    OpenMP gives each computing thread its own team of threads, which lives as long as the computing thread. If the team
    of the loading thread stayed, the process would have more OpenMP threads than cores. GNU's OpenMP then does not let
    waiting threads spin: every kernel of a step would first have to wake its team by system calls. The loading thread
    is a daemon, so an exit of the process does not wait for it.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    return future.result()
