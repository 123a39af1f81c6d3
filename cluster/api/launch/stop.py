"""How `aerie serve` ends: calls first, then Serve, then Ray; and what its signals mean."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError

STOPS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.2
ANSWER_TIMEOUT_S = 5.0  # of the replicas, when they are told
ERRORS_TIMEOUT_S = 3.0  # how long error events may take to reach their clients
FLUSH_S = 0.5  # for the proxy to pass on the end of the last call, after the replica has ended it


class StopSignals:
    """The first SIGINT or SIGTERM asks for an orderly end; the second ends everything at once.

    A handler runs between any two instructions of the main thread, which may hold any lock: so it takes none. Inside
    `ray.init` the handler of SIGTERM is for a while one of Ray's that aborts the process, so SIGTERM is held meanwhile.
    """

    def __init__(self) -> None:
        self.asked = False
        self._at_once: Callable[[], None] | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Install the handlers for a block, which begins with SIGTERM held: kept pending, for this thread and those
        that it starts, until `release`.
        """
        before = {number: signal.getsignal(number) for number in STOPS}
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
        self._install()
        try:
            yield
        finally:
            self.release()  # a SIGTERM that is still pending is ours to take
            for number, handler in before.items():
                signal.signal(number, handler)

    def release(self) -> None:
        """Install the handlers again, since `ray.init` installs its own, and take a SIGTERM that is pending."""
        self._install()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))

    def on_second(self, at_once: Callable[[], None]) -> None:
        """Have `at_once` called at the second signal, before the process ends."""
        self._at_once = at_once

    def check(self) -> None:
        """Raise KeyboardInterrupt if an end was asked for."""
        if self.asked or signal.SIGTERM in signal.sigpending():
            raise KeyboardInterrupt

    def wait(self) -> None:
        """Return once an end is asked for."""
        while not self.asked:
            time.sleep(POLL_S)

    def _install(self) -> None:
        for number in STOPS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            try:
                if self._at_once is not None:
                    self._at_once()
            finally:
                os._exit(128 + number)
        self.asked = True


def drain(serve: Any, name: str, timeout_s: float, say: Callable[[str], None]) -> None:
    """Have an application refuse new calls, and wait for its open ones; those open at the timeout end with an error.

    Its ingress replicas are told again and again, so that one that starts meanwhile is told too. This comes before
    `serve.shutdown`, which would first end the proxy, and all streams with it. `serve` is the module `ray.serve`, which
    takes too long to import at the top. A failure is reported by `say`, and the shutdown goes on.
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
    """Tell all ingress replicas to refuse new calls; returns how many calls they have open together.

    A dead replica has none; one that does not answer may have some, and counts as one call.
    """
    answers = front.broadcast("drain").results(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
    return sum(answer if isinstance(answer, int) else not _is_dead(answer) for answer in answers)


def _is_dead(answer: Any) -> bool:
    return isinstance(answer, RayActorError) and not isinstance(answer, ActorUnavailableError)


def _calls(count: int) -> str:
    return f"{count} call{'' if count == 1 else 's'}"
