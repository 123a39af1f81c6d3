"""The file of passes: a line for each, of a digest and the id of a test."""

import os
from pathlib import Path


class Record:
    """Passes on disk. Several processes may append to one file at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def size(self) -> int:
        """Return the length of the file in bytes, 0 if there is none."""
        return self.path.stat().st_size if self.path.exists() else 0

    def passes(self, size: int) -> set[tuple[str, str]]:
        """Return (digest, id of the test) of each pass in the first `size` bytes.

        A line that was cut off when its writer was ended is ignored, and so is the line that was appended to it.
        """
        if not self.path.exists():
            return set()
        with self.path.open("rb") as file:
            *whole, _cut_off = file.read(size).decode("utf-8", "replace").split("\n")
        lines = (line.split("\t") for line in whole)
        return {(line[0], line[1]) for line in lines if len(line) == 2}

    def add(self, digest: str, test: str) -> None:
        """Append a pass; it is on disk, or in the system's hands, when this returns."""
        if "\t" in test or "\n" in test:
            return  # pytest writes neither in an id
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, f"{digest}\t{test}\n".encode())
        finally:
            os.close(file)
