"""Records which files of the checkout Python opens while a test runs, to check the rules on what a test depends on."""

import os
import re
import sys
from pathlib import Path
from typing import Any

COMPILED = re.compile(r"__pycache__/([^/.]+)\.[^/]*\.pyc$")
"""`__pycache__/module.cpython-311.pyc`, which Python opens in place of `module.py`."""


class OpenedFiles:
    """Records the files under `root` that this process opens from now on, as paths relative to `root`.

    Only files that Python opens are recorded, not those that C libraries or other processes open.
    """

    def __init__(self, root: Path) -> None:
        self._root = f"{root}/"
        self._paths: set[str] = set()
        sys.addaudithook(self._on_audit_event)  # Python cannot remove an audit hook again

    def _on_audit_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            try:
                path = os.path.abspath(os.fsdecode(arguments[0]))  # noqa: PTH100  # `resolve` would follow links
            except OSError:
                return  # the current folder was deleted
            if path.startswith(self._root):
                self._paths.add(path)

    def take(self) -> list[str]:
        """Return the files opened since the last call; in place of a bytecode file its source."""
        paths, self._paths = self._paths, set()
        return sorted({COMPILED.sub(r"\1.py", path.removeprefix(self._root)) for path in paths})
