"""The file of passes. Each line is one pass: the digest of a test module and the id of a test."""

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

        A line is ignored if its writer was killed before the end of the line. The next pass, which another writer
        appended to that line, is ignored too.
        """
        if not self.path.exists():
            return set()
        with self.path.open("rb") as file:
            *complete_lines, _cut_off = file.read(size).decode("utf-8", "replace").split("\n")
        lines = (line.split("\t") for line in complete_lines)
        return {(line[0], line[1]) for line in lines if len(line) == 2}

    def add(self, digest: str, test: str) -> None:
        """Append a pass. When this returns, the operating system has the line, though perhaps not yet on disk."""
        if "\t" in test or "\n" in test:
            return  # pytest writes neither of them into an id
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, f"{digest}\t{test}\n".encode())
        finally:
            os.close(file)
