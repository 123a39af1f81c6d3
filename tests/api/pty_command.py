"""An `aerie` command on a terminal of its own: what it shows is read, keys are pressed."""

import os
import pty
import re
import select
import signal
import sys
import time
from types import TracebackType
from typing import Self

from tests.actors.conftest import CHECKOUT

WITHIN_S = 120.0
CTRL_C, CTRL_D = "\x03", "\x04"


class PtyCommand:
    """A command for as long as a `with` block lasts."""

    def __init__(self, *words: str, **environment: str) -> None:
        self.shown = ""
        self._seen = 0
        paths = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
        kept = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        env = {**kept, "TERM": "xterm", "PYTHONPATH": paths, "COLUMNS": "120", "LINES": "40", **environment}
        self._pid, self._keys = pty.fork()
        if self._pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # it is ignored where the tests run in the background
            os.execve(sys.executable, [sys.executable, "-m", "cluster.cli", *words], env)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._keys)

    def press(self, keys: str) -> None:
        os.write(self._keys, keys.encode())

    def until(self, pattern: str, again: str = "") -> str:
        """What is shown after the last match and up to the next one of `pattern`. The keys `again` are pressed every
        second: a signal that comes just before readline waits is noticed with the next key.
        """
        until = time.monotonic() + WITHIN_S
        while (found := re.search(pattern, self.shown[self._seen :])) is None:
            if not select.select([self._keys], [], [], 1.0)[0]:
                assert time.monotonic() < until, f"no {pattern!r} in {self.shown[self._seen :]!r}"
                self.press(again)
                continue
            assert self._read(), f"it ended without {pattern!r} in {self.shown[self._seen :]!r}"
        shown = self.shown[self._seen : self._seen + found.end()]
        self._seen += found.end()
        return shown

    def status(self) -> int:
        """Its exit status, once it has ended."""
        while self._read():
            pass
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        """Read what it shows next; False at its end."""
        ready, _, _ = select.select([self._keys], [], [], WITHIN_S)
        assert ready, f"it shows nothing more after {self.shown!r}"
        try:
            data = os.read(self._keys, 1 << 16)
        except OSError:  # Linux, where the other end is closed
            return False
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
