"""The results of planted faults, one JSON object in each line of a file. After an interruption a run continues from
the stored results.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["found", "not found", "no fault", "unknown"]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one planted fault. `fault` is the fault's name; `digest` is the checksum of the fault, and `tree`
    that of the files on which the result depends.

    `by` is the test that found the fault, or what happened instead. The outcome is "no fault" if the fault breaks an
    import or the C compiler, or if the test that found it also fails without it. The outcome is "unknown" if the tests
    took too long or were ended. `proved`: the test that found the fault passes without the fault.
    """

    fault: str
    digest: str
    tree: str
    outcome: Outcome
    by: str
    seconds: float
    proved: bool = False

    @property
    def test(self) -> str | None:
        """The test that found the fault, if one did."""
        return self.by if self.outcome == "found" and "::" in self.by else None


class Results:
    """The results in a file. If it has several results of a fault on the same tree, the last one counts."""

    def __init__(self, path: Path) -> None:
        """Read the results in `path`, if the file exists."""
        self._path = path
        self._known: dict[tuple[str, str], Result] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._store(Result(**json.loads(line)))

    def of(self, digest: str, tree: str) -> Result | None:
        """The result of the fault with this `digest` on this `tree`, if there is one."""
        return self._known.get((digest, tree))

    def add(self, result: Result) -> None:
        """Append a result to the file."""
        self._store(result)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def _store(self, result: Result) -> None:
        self._known[result.digest, result.tree] = result


def table(results: list[Result]) -> str:
    """The results as text, one line each, under a line of titles."""
    rows = [("fault", "outcome", "s", "by")]
    rows += [(each.fault, each.outcome, f"{each.seconds:.0f}", each.by) for each in results]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{name:<{widths[0]}}  {outcome:<{widths[1]}}  {seconds:>{widths[2]}}  {by}"
        for name, outcome, seconds, by in rows
    )
