"""What became of planted faults, one JSON object a line, so that a run that was stopped goes on where it was."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["found", "not found", "no fault", "unknown"]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one fault. `fault` is its name; `digest` and `tree` are the checksums of the fault and of the
    files on which the result depends.

    `by` is the test that found it, or what happened instead. "no fault": it breaks an import or the C compiler, or the
    test that found it fails without it too. "unknown": its tests took too long or were ended.
    `proved`: the test that found it passes without it.
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
    """The results in a file; of one fault and tree the last one counts."""

    def __init__(self, path: Path) -> None:
        """`path` need not exist."""
        self._path = path
        self._known: dict[tuple[str, str], Result] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._keep(Result(**json.loads(line)))

    def of(self, digest: str, tree: str) -> Result | None:
        """The result of the fault with this `digest` on this `tree`, if there is one."""
        return self._known.get((digest, tree))

    def add(self, result: Result) -> None:
        """Append a result to the file."""
        self._keep(result)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def _keep(self, result: Result) -> None:
        self._known[result.digest, result.tree] = result


def table(results: list[Result]) -> str:
    """The results as text, one line each, under a line of titles."""
    rows = [("fault", "outcome", "s", "by")]
    rows += [(each.fault, each.outcome, f"{each.seconds:.0f}", each.by) for each in results]
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    return "\n".join(
        f"{name:<{widths[0]}}  {outcome:<{widths[1]}}  {seconds:>{widths[2]}}  {by}"
        for name, outcome, seconds, by in rows
    )
