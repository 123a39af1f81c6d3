"""A file that stores the partial results of a long stage, so that an interrupted stage can continue."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class ResultCache:
    """JSON-ready values by name, one line each in a file. A line that an interruption cut short is dropped."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._values: dict[str, object] = {}
        if file.is_file():
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            complete_lines = [line for line in lines if line.endswith("\n")]
            self._values = dict(json.loads(line) for line in complete_lines)
            file.write_text("".join(complete_lines), encoding="utf-8")

    def get_or_make(self, name: str, make: Callable[[], T]) -> T:
        """Return the value of that name; if there is none, make it with `make` and store it."""
        if name not in self._values:
            self._values[name] = value = make()
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, value]) + "\n")
        return self._values[name]  # type: ignore[return-value]
