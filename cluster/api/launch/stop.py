"""How `aerie serve` ends: calls first, then Serve, then Ray; and what its signals mean."""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError

POLL_S = 0.2
ANSWER_TIMEOUT_S = 5.0  # of the replicas, when they are told
ERRORS_TIMEOUT_S = 3.0  # how long error events may take to reach their clients
FLUSH_S = 0.5  # between the end of the last call at its replica and the end of the proxy that still passes it on


class StopSignals:
    """The first SIGINT or SIGTERM asks for an orderly end; the second ends everything at once.

    A handler runs between any two instructions of the main thread, which may hold any lock: so it takes none.
    """

    def __init__(self) -> None:
        self.asked = False
        self.at_once: Callable[[], None] | None = None  # what the second signal does before the process ends

    def install(self) -> None:
        """Take the signals; again after `ray.init`, which takes them for itself."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def wait(self) -> None:
        """Return once an end is asked for."""
        while not self.asked:
            time.sleep(POLL_S)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            try:
                if self.at_once is not None:
                    self.at_once()
            finally:
                os._exit(128 + number)
        self.asked = True


def drain(serve: Any, name: str, timeout_s: float, say: Callable[[str], None]) -> None:
    """Have an application refuse new calls and end its open ones: in their own time, or with an error at the timeout.

    The replicas of its ingress are told again and again, so that one that comes up meanwhile hears of it too. The proxy
    has to be there all the while: `serve.shutdown` would end it first, and all streams with it. `serve` is that module,
    which takes too long to import for an import here. What goes wrong is said, and the end goes on.
    """
    until = time.monotonic() + timeout_s
    try:
        front: Any = serve.get_app_handle(name)
        open_calls = _open_calls(front)
        if open_calls:
            say(
                f"draining: {_calls(open_calls)} open, new ones are refused (503); waiting up to {timeout_s:g} s; "
                "another signal (Ctrl-C) ends at once"
            )
        while open_calls and time.monotonic() < until:
            time.sleep(POLL_S)
            open_calls = _open_calls(front)
        if open_calls:
            say(f"{_calls(open_calls)} open after graceful_shutdown_timeout_s ({timeout_s:g} s), ended with an error")
            front.broadcast("end_streams").results(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
            until = time.monotonic() + ERRORS_TIMEOUT_S
            while _open_calls(front) and time.monotonic() < until:
                time.sleep(POLL_S)
        time.sleep(FLUSH_S)
    except Exception as error:
        say(f"the replicas could not be told to drain: {type(error).__name__}: {error}")


def _open_calls(front: Any) -> int:
    """Tell all replicas of the ingress to refuse new calls; how many are open in all, as far as they say.

    A replica that is dead has none; one that does not answer may have some, and counts as one.
    """
    answers = front.broadcast("drain").results(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
    return sum(answer if isinstance(answer, int) else not _is_dead(answer) for answer in answers)


def _is_dead(answer: Any) -> bool:
    return isinstance(answer, RayActorError) and not isinstance(answer, ActorUnavailableError)


def _calls(count: int) -> str:
    return f"{count} call{'' if count == 1 else 's'}"
