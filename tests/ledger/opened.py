"""Which files of the checkout Python opens while a test runs: a check of the rules that say what a test depends on."""

import os
import re
import sys
from pathlib import Path
from typing import Any

COMPILED = re.compile(r"__pycache__/([^/.]+)\.[^/]*\.pyc$")
"""`__pycache__/module.cpython-311.pyc`, which Python opens in place of `module.py`."""


class Opened:
    """Notes the files under `root`, relative to it, that this process opens from now on.

    It sees what Python opens, not what libraries in C or other processes do.
    """

    def __init__(self, root: Path) -> None:
        self._root = f"{root}/"
        self._paths: set[str] = set()
        sys.addaudithook(self._heard)  # there is no way to remove a hook

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            try:
                path = os.path.abspath(os.fsdecode(arguments[0]))  # noqa: PTH100  # `resolve` would follow links
            except OSError:
                return  # there is no current folder any more
            if path.startswith(self._root):
                self._paths.add(path)

    def taken(self) -> list[str]:
        """Return the files since the last call, a source in place of what Python compiled it to."""
        paths, self._paths = self._paths, set()
        return sorted({COMPILED.sub(r"\1.py", path.removeprefix(self._root)) for path in paths})
