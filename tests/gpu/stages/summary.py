"""The summary of a run: one line of JSON that is made from all lines of results, also if stages did not finish."""

import argparse
import json
from pathlib import Path
from typing import Any


def summary(lines: list[dict[str, Any]], stage_names: list[str], dry: bool) -> dict[str, Any]:
    """Return for each stage its status, the number of passed checks, the failed checks with reasons, and figures."""
    stages: dict[str, Any] = {}
    for name in stage_names:
        stage_lines = [line for line in lines if line["stage"] == name]
        end_line = next(
            (line for line in stage_lines if "status" in line), {"status": "not run", "seconds": 0, "why": "cut off"}
        )
        checks = [line for line in stage_lines if "check" in line]
        stages[name] = {
            "status": end_line["status"],
            "seconds": end_line["seconds"],
            "passed": sum(line["passed"] is True for line in checks),
            "failed": {line["check"]: line["why"] for line in checks if line["passed"] is False},
            "figures": [line["figure"] for line in stage_lines if "figure" in line],
        }
        reasons = [line["why"] for line in checks if line["passed"] is None] or [end_line["why"]]
        if end_line["status"] != "passed":
            stages[name]["why"] = reasons[0]
    bad = [name for name, entry in stages.items() if entry["status"] not in ("passed", "not here")]
    return {"what": "gpu", "dry": dry, "passed": not bad, "bad": bad, "stages": stages}


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the lines of results. A line that is incomplete, because its stage was killed, is left out."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(line)
        except ValueError:
            continue
        lines += [line] if isinstance(line, dict) and "stage" in line else []
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("asked", nargs="*")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    run_summary = summary(read_results(args.out / "results.jsonl"), args.asked, args.dry)
    (args.out / "summary.json").write_text(json.dumps(run_summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(run_summary))
    raise SystemExit(0 if run_summary["passed"] else 1)
