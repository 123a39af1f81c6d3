"""Parts of a long stage, kept on the disk as they are made, so that a stage which was interrupted goes on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class Kept:
    """JSON-ready values by name, a line each in a file; a line that was cut short by an interruption is left out."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._values: dict[str, object] = {}
        if file.is_file():
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            self._values = dict(json.loads(line) for line in whole)
            file.write_text("".join(whole), encoding="utf-8")

    def get(self, name: str, make: Callable[[], T]) -> T:
        """The value of that name, made and kept where it is not there yet."""
        if name not in self._values:
            self._values[name] = value = make()
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, value]) + "\n")
        return self._values[name]  # type: ignore[return-value]
