"""An `aerie` command on its own pseudo-terminal: a test reads the command's output and presses keys."""

import os
import pty
import re
import select
import signal
import sys
import time
from types import TracebackType
from typing import Self

from tests.serving.actors.conftest import CHECKOUT

TIMEOUT_S = 120.0
CTRL_C, CTRL_D = "\x03", "\x04"


class PtyCommand:
    """An `aerie` command. The end of the `with` block kills it, if it still runs."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.output = ""
        self._read_position = 0
        python_path = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
        inherited_variables = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        env = {
            **inherited_variables,
            "TERM": "xterm",
            "PYTHONPATH": python_path,
            "COLUMNS": "120",
            "LINES": "40",
            **environment,
        }
        self._pid, self._terminal_fd = pty.fork()
        if self._pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # background test runs ignore SIGINT
            os.execve(sys.executable, [sys.executable, "-m", "cluster.cli", *arguments], env)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._terminal_fd)

    def press(self, keys: str) -> None:
        os.write(self._terminal_fd, keys.encode())

    def read_until(self, pattern: str, repeated_keys: str = "") -> str:
        """Read until `pattern` matches. Return the output from the end of the previous match to the end of this match.

        While it waits, this method presses the keys `repeated_keys` every second: if a signal comes just before
        readline waits for a key, readline notices the signal only at the next key.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while (match := re.search(pattern, self.output[self._read_position :])) is None:
            if not select.select([self._terminal_fd], [], [], 1.0)[0]:
                assert time.monotonic() < deadline, f"no match of {pattern!r} in {self.output[self._read_position :]!r}"
                self.press(repeated_keys)
                continue
            assert self._read(), f"the command ended, no {pattern!r} in {self.output[self._read_position :]!r}"
        output = self.output[self._read_position : self._read_position + match.end()]
        self._read_position += match.end()
        return output

    def exit_status(self) -> int:
        """Wait until the command ends, and return its exit status."""
        while self._read():
            pass
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        """Read more output of the command; return False at the end of the output."""
        ready, _, _ = select.select([self._terminal_fd], [], [], TIMEOUT_S)
        assert ready, f"the command writes nothing more after {self.output!r}"
        try:
            data = os.read(self._terminal_fd, 1 << 16)
        except OSError:  # Linux raises it when the command has closed its end
            return False
        self.output += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
