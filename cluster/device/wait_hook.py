"""A hook for waiting, kept in a context variable. Code inside a step calls `wait_for_device`. The code that runs the
step sets what this call does: it waits under the watchdog. So the code inside the step does not depend on the watchdog.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_wait: ContextVar[Callable[[], None] | None] = ContextVar("wait", default=None)


@contextmanager
def wait_hook_set(wait: Callable[[], None]) -> Iterator[None]:
    """Have `wait_for_device` call `wait` in this block. `wait` raises if the device will never finish its work."""
    token = _wait.set(wait)
    try:
        yield
    finally:
        _wait.reset(token)


def wait_for_device() -> None:
    """Wait until the device has done all work queued so far. Outside a `wait_hook_set` block return at once: the next
    read of a result waits by itself.

    Raises:
        GangError: the device is stuck, or a peer is lost.
    """
    wait = _wait.get()
    if wait is not None:
        wait()
