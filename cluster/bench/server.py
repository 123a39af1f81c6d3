"""Run `aerie serve` as a process for the duration of a `with` block."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from cluster.api.core.api_keys import SCOPE_OF_VARIABLE
from cluster.bench.processes import ProcessEntry, process_tree, wait_or_kill
from cluster.bench.streams import HOST
from cluster.paths.checkout import DEMO_CONFIG, demo_path

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
OUTPUT_LINES = 40
READY_PREFIX = "READY "
TWO_RANKS = ("tp_size=2", "attn_dp_size=2")


class ServerError(ValueError):
    """The server did not become ready; the message holds the last lines of its output."""


class ServerProcess:
    """A server process. Entering the `with` block waits until the server is ready; leaving it stops the server and
    its live descendants.

    `ready_s` is the seconds from the start of the process until the server was ready. `killed_processes` lists the
    processes that did not end by themselves when the server was stopped, and were killed.
    """

    def __init__(self, settings: Sequence[str], config: Path | None = None) -> None:
        """`settings` are `key=value`, as for `aerie serve --set`; this class chooses the port. Without `config`, the
        server gets the demo's config.

        Raises:
            ConfigError: `config` is None, and this installation has no demo config.
        """
        self.port = _unused_port()
        self.ready_s = 0.0
        self.killed_processes: list[ProcessEntry] = []
        self._settings = [f"http_port={self.port}", *settings]
        self._config = config or Path(demo_path(DEMO_CONFIG, "give --config FILE"))
        self._output_lines: deque[str] = deque(maxlen=OUTPUT_LINES)
        self._ready = threading.Event()
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        started_at = time.monotonic()
        command = [sys.executable, "-m", "cluster.cli", "serve", "--config", str(self._config)]
        for setting in self._settings:
            command += ["--set", setting]
        # The server runs in its own session, so Ctrl-C at the terminal does not reach it; only `_stop` sends it SIGINT.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={k: v for k, v in os.environ.items() if k not in SCOPE_OF_VARIABLE} | {"PYTHONUNBUFFERED": "1"},
        )
        threading.Thread(target=self._read_output, daemon=True).start()
        try:
            self._wait_ready()
        except BaseException:
            self._stop()
            raise
        self.ready_s = time.monotonic() - started_at
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def processes(self) -> list[ProcessEntry]:
        """Return every live process of the server: the one started here and all its descendants."""
        return process_tree(self._process.pid)

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._output_lines.append(line.rstrip())
            if line.startswith(READY_PREFIX):
                self._ready.set()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready.wait(0.05):
            if self._process.poll() is not None:
                raise ServerError(
                    f"aerie serve ended with exit code {self._process.returncode}:\n{self._last_output()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(f"aerie serve is not ready after {START_TIMEOUT_S:.0f} s:\n{self._last_output()}")

    def _last_output(self) -> str:
        time.sleep(0.2)  # the last lines may still be on their way through the pipe
        return "\n".join(self._output_lines)

    def _stop(self) -> None:
        """Send SIGINT, wait for all processes, and kill those that are left. If Ctrl-C ends the wait, kill at once."""
        process, processes = self._process, self.processes()
        grace_s = 0.0
        try:
            with suppress(subprocess.TimeoutExpired):
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    process.wait(STOP_TIMEOUT_S)
                grace_s = 5.0
        finally:
            self.killed_processes = wait_or_kill(processes, grace_s)
            process.wait()


def _unused_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
