"""The way to wait for the device amid a step, for those who must ask it something and do not know who watches it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_wait: ContextVar[Callable[[], None] | None] = ContextVar("wait", default=None)


@contextmanager
def watched(wait: Callable[[], None]) -> Iterator[None]:
    """In this block `catch_up` is `wait`, which may raise where the device will never come so far."""
    token = _wait.set(wait)
    try:
        yield
    finally:
        _wait.reset(token)


def catch_up() -> None:
    """Wait until the device has done all that was queued so far; where nobody watches it, whatever is read next waits.

    Raises:
        GangError: it never will, or a peer is lost.
    """
    wait = _wait.get()
    if wait is not None:
        wait()
