"""The end of `aerie serve`: signal handlers, and the draining of open calls before Serve and Ray end."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.2
ANSWER_TIMEOUT_S = 5.0  # for the replicas' answers to a broadcast call
ERRORS_TIMEOUT_S = 3.0  # for error events to reach their clients
FLUSH_S = 0.5  # for the proxy to pass on the end of the last call, after the replica has ended it


class StopSignals:
    """Signal handlers: the first SIGINT or SIGTERM requests an orderly end, the second ends everything at once.

    A handler runs between any two instructions of the main thread, which may hold any lock, so the handler takes none.
    While `ray.init` runs, Ray has a SIGTERM handler of its own for a while, which aborts the process. So SIGTERM is
    blocked while `ray.init` runs.
    """

    def __init__(self) -> None:
        self.stop_requested = False
        self._on_second_signal: Callable[[], None] | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the handlers inside the `with` block. Until `release` is called, SIGTERM is blocked in this thread
        and in the threads that it starts; a SIGTERM that comes meanwhile stays pending.
        """
        previous_handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
        self._install()
        try:
            yield
        finally:
            self.release()  # handle a SIGTERM that is still pending
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def release(self) -> None:
        """Install the handlers again, because `ray.init` replaced them, and unblock SIGTERM. A pending SIGTERM is then
        handled.
        """
        self._install()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))

    def on_second_signal(self, callback: Callable[[], None]) -> None:
        """Set the function that is called at the second signal, before the process ends."""
        self._on_second_signal = callback

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal came, even if it is a SIGTERM that is still pending."""
        if self.stop_requested or signal.SIGTERM in signal.sigpending():
            raise KeyboardInterrupt

    def wait(self) -> None:
        """Wait until a signal comes."""
        while not self.stop_requested:
            time.sleep(POLL_S)

    def _install(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested:
            try:
                if self._on_second_signal is not None:
                    self._on_second_signal()
            finally:
                os._exit(128 + number)
        self.stop_requested = True


def drain(serve: Any, name: str, timeout_s: float, report: Callable[[str], None]) -> None:
    """Make the application `name` refuse new calls, and wait up to `timeout_s` seconds for its open calls. Calls that
    are still open then end with an error.

    The ingress replicas are told repeatedly, so that a replica that starts meanwhile refuses too. Call this function
    before `serve.shutdown`, because `serve.shutdown` ends the proxy first, which cuts all streams. `serve` is the
    module `ray.serve`, which takes too long to import at the top of this file. `report` prints the progress. If
    draining fails, `report` prints the error, and this function returns normally.
    """
    deadline = time.monotonic() + timeout_s
    try:
        ingress: Any = serve.get_app_handle(name)
        open_calls = _open_calls(ingress)
        if open_calls:
            report(
                f"draining: {_calls_text(open_calls)} open, new ones are refused (503); waiting up to {timeout_s:g} s; "
                "another signal (Ctrl-C) ends at once"
            )
        while open_calls and time.monotonic() < deadline:
            time.sleep(POLL_S)
            open_calls = _open_calls(ingress)
        if open_calls:
            report(
                f"{_calls_text(open_calls)} open after graceful_shutdown_timeout_s ({timeout_s:g} s), "
                "ended with an error"
            )
            ingress.broadcast("end_streams").results(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
            deadline = time.monotonic() + ERRORS_TIMEOUT_S
            while _open_calls(ingress) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        time.sleep(FLUSH_S)
    except Exception as error:
        report(f"the replicas could not be told to drain: {type(error).__name__}: {error}")


def _open_calls(ingress: Any) -> int:
    """Tell all ingress replicas to refuse new calls; return the number of their open calls.

    A dead replica counts as 0 calls. A replica that does not answer may have open calls, so it counts as 1.
    """
    answers = ingress.broadcast("drain").results(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
    return sum(answer if isinstance(answer, int) else not _is_dead(answer) for answer in answers)


def _is_dead(answer: Any) -> bool:
    return isinstance(answer, RayActorError) and not isinstance(answer, ActorUnavailableError)


def _calls_text(count: int) -> str:
    return f"{count} call{'' if count == 1 else 's'}"
