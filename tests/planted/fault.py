"""The table of faults: `faults/*.toml`, a file for each part of the product."""

import hashlib
import json
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

TABLE = Path(__file__).parent / "faults"


class StaleFaultError(Exception):
    """A fault no longer fits the source. The message names the fault and says what to change in the table."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake: in `file` the text `old`, which occurs exactly once, becomes `new`.

    `effect` says what a user would see if no test found the mistake. `tests` are paths, relative to the root of the
    checkout, of the tests that should find the fault. They run in this order until a test fails; the test that most
    likely fails comes first.
    """

    name: str
    file: str
    old: str
    new: str
    effect: str
    tests: tuple[str, ...]

    @property
    def digest(self) -> str:
        """A checksum of all fields."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]

    def plant(self, source: str) -> str:
        """Return `source`, the text of `file`, with the mistake in it.

        Raises:
            StaleFaultError: `old` does not occur, or occurs several times.
        """
        count = source.count(self.old)
        if count != 1:
            raise StaleFaultError(
                f"fault {self.name!r}: its old text occurs {count} times in {self.file}, and must occur once; "
                f"change the fault in tests/planted/faults to fit the file"
            )
        return source.replace(self.old, self.new)


def all_faults(table: Path = TABLE) -> list[Fault]:
    """Return the faults of all files of the `table`, in order of file and place.

    Raises:
        ValueError: two faults have the same name.
    """
    faults = [
        Fault(**{**entry, "tests": tuple(entry["tests"])})
        for path in sorted(table.glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    ]
    names = [fault.name for fault in faults]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(f"several faults have the same name: {duplicates}")
    return faults
