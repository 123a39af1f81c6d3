"""Prints the warnings and errors of all processes of the server on the terminal of `aerie serve`."""

import logging
import sys
import threading

from cluster.observability.logs import LogFollower, level_and_logger

POLL_S = 0.3
SERVE_LOGGER = "cluster.api.launch.serve"  # not printed here: `cluster.api.launch.serve` prints its own messages


class Console:
    """Follows the log file `path` in a thread, from construction until `stop`, and prints warnings and errors."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._follower = LogFollower(path)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Print the warnings and errors that are not printed yet, and end the thread."""
        self._stopped.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            self._print_new_lines()
        self._print_new_lines()

    def _print_new_lines(self) -> None:
        highest_level = 0
        for line in self._follower.lines():
            level, logger = level_and_logger(line)
            if level >= logging.WARNING and logger != SERVE_LOGGER:
                print(line, file=sys.stderr)
                highest_level = max(highest_level, level)
        if highest_level >= logging.ERROR:
            print(f"aerie serve: more in the log, {self._path}", file=sys.stderr)
        sys.stderr.flush()
