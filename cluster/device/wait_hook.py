"""A context-local hook: code inside a step waits for the device through it, under the watchdog, without knowing the
watchdog.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_wait: ContextVar[Callable[[], None] | None] = ContextVar("wait", default=None)


@contextmanager
def watched(wait: Callable[[], None]) -> Iterator[None]:
    """Have `catch_up` call `wait` in this block. `wait` raises if the device will never finish its work."""
    token = _wait.set(wait)
    try:
        yield
    finally:
        _wait.reset(token)


def catch_up() -> None:
    """Wait until the device has done all work queued so far. Outside a `watched` block return at once: the next read of
    a result waits by itself.

    Raises:
        GangError: the device is stuck, or a peer is lost.
    """
    wait = _wait.get()
    if wait is not None:
        wait()
