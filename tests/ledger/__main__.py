"""Run the slow suites one after the other, leaving out what passed on the same files: `python -m tests.ledger`."""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.ledger.plugin import FILE
from tests.ledger.suites import SUITES, Suite

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".verify"
USUAL = tuple(suite.name for suite in SUITES if suite.by_default)
COLUMNS = ("ran", "passed", "recorded earlier", "failed", "skipped")


def numbers(summary: dict[str, Any]) -> dict[str, int]:
    """The columns of one suite's row, from what the plugin wrote."""
    ended = {name: summary.get(name, 0) for name in ("passed", "failed", "skipped")}
    return {"ran": sum(ended.values()), "recorded earlier": summary.get("earlier", 0), **ended}


def run(suite: Suite) -> dict[str, Any]:
    """Run a suite and return its row. What pytest prints goes to the terminal."""
    summary = FOLDER / f"{suite.name}.json"
    summary.unlink(missing_ok=True)
    own = ["--durations=10", "--continue-on-collection-errors", "-p", "tests.ledger.plugin"]
    own += [f"--ledger={FOLDER}", f"--ledger-summary={summary}"]
    environment = os.environ | suite.environment
    command = [sys.executable, "-m", "pytest", "-q", *own, *suite.options]
    print(f"\n== {suite.name}: {' '.join(suite.options)}", flush=True)
    began = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    said = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    return {"suite": suite.name, **numbers(said), "seconds": round(time.monotonic() - began), "status": status,
            "failures": said.get("failures", [])}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, and those tests that failed."""
    heads = ("suite", *COLUMNS, "seconds")
    total = {"suite": "all", **{name: sum(row[name] for row in rows) for name in heads[1:]}}
    cells = [heads, *(tuple(str(row[head]) for head in heads) for row in [*rows, total])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    for row in rows:
        lines += [f"FAILED {test}" for test in row["failures"]]
        if row["status"] and not row["failures"]:
            lines.append(f"FAILED {row['suite']}: pytest ended with status {row['status']}")
    return "\n".join(lines)


def main() -> int:
    """Return the exit status: 0 if every suite ran to its end and nothing failed."""
    names = [suite.name for suite in SUITES]
    known = f"of {', '.join(names)}; default: {', '.join(USUAL)}"
    parser = argparse.ArgumentParser(prog="python -m tests.ledger", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=known)
    parser.add_argument("--fresh", action="store_true", help="forget what passed earlier")
    asked = parser.parse_args()
    if unknown := [name for name in asked.suites if name not in names]:
        parser.error(f"there is no suite {', '.join(unknown)}; the suites are {', '.join(names)}")
    FOLDER.mkdir(exist_ok=True)
    if asked.fresh:
        (FOLDER / FILE).unlink(missing_ok=True)
    chosen = [suite for suite in SUITES if suite.name in (asked.suites or USUAL)]
    rows: list[dict[str, Any]] = []
    with suppress(KeyboardInterrupt):  # the suite that it ends has recorded what passed
        for suite in chosen:
            rows.append(run(suite))  # noqa: PERF401  # what has ended counts, also after an interruption
    print(f"\n{table(rows)}")
    if missing := chosen[len(rows) :]:
        print(f"interrupted; not finished: {', '.join(suite.name for suite in missing)}")
    return int(bool(missing) or any(row["status"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
