"""Defer Ctrl-C during an engine step: an interrupted step would leave requests and KV cache inconsistent."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class DeferredInterrupt:
    """Records whether Ctrl-C was pressed inside `defer_interrupt`: `pressed` is then True."""

    pressed = False


@contextmanager
def defer_interrupt() -> Iterator[DeferredInterrupt]:
    """Record the first Ctrl-C instead of raising KeyboardInterrupt; a second Ctrl-C raises as usual.

    The caller checks `pressed` between steps. In a thread other than the main thread this does nothing, because only
    the main thread gets Ctrl-C.
    """
    interrupt = DeferredInterrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def record_interrupt(number: int, frame: FrameType | None) -> None:
        interrupt.pressed = True
        signal.signal(number, previous_handler)

    previous_handler = signal.signal(signal.SIGINT, record_interrupt)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous_handler)
