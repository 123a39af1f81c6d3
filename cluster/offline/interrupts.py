"""Ctrl-C on hold: a step of an engine must not be cut short, or its requests and its KV cache no longer agree."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class HeldInterrupt:
    """Whether Ctrl-C was pressed while it was held."""

    pressed = False


@contextmanager
def interrupt_held() -> Iterator[HeldInterrupt]:
    """Note the first Ctrl-C instead of raising it, so that what must not be cut short can end; the second is raised.

    Python raises Ctrl-C in its main thread only. In other threads there is nothing to hold.
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
