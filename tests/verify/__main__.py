"""Run the slow suites one after the other, without tests that passed on the same files: `python -m tests.verify`."""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.verify.plugin import FILE
from tests.verify.suites import SUITES, Suite

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".verify"
DEFAULT_SUITES = tuple(suite.name for suite in SUITES if suite.by_default)
COLUMNS = ("ran", "passed", "recorded earlier", "failed", "skipped")


def row_numbers(summary: dict[str, Any]) -> dict[str, int]:
    """The numbers of one suite's row, by column, from the summary that the plugin wrote."""
    outcome_counts = {name: summary.get(name, 0) for name in ("passed", "failed", "skipped")}
    return {"ran": sum(outcome_counts.values()), "recorded earlier": summary.get("earlier", 0), **outcome_counts}


def run(suite: Suite) -> dict[str, Any]:
    """Run a suite and return its row. What pytest prints goes to the terminal."""
    summary = FOLDER / f"{suite.name}.json"
    summary.unlink(missing_ok=True)
    plugin_options = ["--durations=10", "--continue-on-collection-errors", "-p", "tests.verify.plugin"]
    plugin_options += [f"--ledger={FOLDER}", f"--ledger-summary={summary}"]
    environment = os.environ | suite.environment
    command = [sys.executable, "-m", "pytest", "-q", *plugin_options, *suite.options]
    print(f"\n== {suite.name}: {' '.join(suite.options)}", flush=True)
    started_at = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    summary_numbers = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    return {
        "suite": suite.name,
        **row_numbers(summary_numbers),
        "seconds": round(time.monotonic() - started_at),
        "status": status,
        "failures": summary_numbers.get("failures", []),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a text table with a line of sums, and below it a line for each test that failed."""
    headings = ("suite", *COLUMNS, "seconds")
    total = {"suite": "all", **{name: sum(row[name] for row in rows) for name in headings[1:]}}
    cells = [headings, *(tuple(str(row[head]) for head in headings) for row in [*rows, total])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    for row in rows:
        lines += [f"FAILED {test}" for test in row["failures"]]
        if row["status"] and not row["failures"]:
            lines.append(f"FAILED {row['suite']}: pytest ended with status {row['status']}")
    return "\n".join(lines)


def main() -> int:
    """Run the suites of the command line; return 0 if every suite ran to its end and no test failed."""
    names = [suite.name for suite in SUITES]
    suites_help = f"of {', '.join(names)}; default: {', '.join(DEFAULT_SUITES)}"
    parser = argparse.ArgumentParser(prog="python -m tests.verify", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=suites_help)
    parser.add_argument("--fresh", action="store_true", help="forget what passed earlier")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.suites if name not in names]:
        parser.error(f"there is no suite {', '.join(unknown)}; the suites are {', '.join(names)}")
    FOLDER.mkdir(exist_ok=True)
    if arguments.fresh:
        (FOLDER / FILE).unlink(missing_ok=True)
    chosen_suites = [suite for suite in SUITES if suite.name in (arguments.suites or DEFAULT_SUITES)]
    rows: list[dict[str, Any]] = []
    with suppress(KeyboardInterrupt):  # an interrupted suite has already recorded the tests that passed
        for suite in chosen_suites:
            rows.append(run(suite))  # noqa: PERF401  # keep the rows of finished suites after an interruption
    print(f"\n{table(rows)}")
    if missing := chosen_suites[len(rows) :]:
        print(f"interrupted; not finished: {', '.join(suite.name for suite in missing)}")
    return int(bool(missing) or any(row["status"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
