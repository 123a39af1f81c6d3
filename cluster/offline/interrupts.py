"""Defer Ctrl-C during an engine step: an interrupted step would leave requests and KV cache inconsistent."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class HeldInterrupt:
    """Whether Ctrl-C was pressed while `interrupt_held` deferred it."""

    pressed = False


@contextmanager
def interrupt_held() -> Iterator[HeldInterrupt]:
    """Record the first Ctrl-C instead of raising KeyboardInterrupt; a second Ctrl-C raises as usual.

    The caller checks `pressed` between steps. Only the main thread gets Ctrl-C, so in other threads this does nothing.
    """
    held = HeldInterrupt()
    if threading.current_thread() is not threading.main_thread():
        yield held
        return

    def note(number: int, frame: FrameType | None) -> None:
        held.pressed = True
        signal.signal(number, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)
