"""The summary of a run: one line of JSON from all lines of results, whatever stages said or left unsaid."""

import argparse
import json
from pathlib import Path
from typing import Any


def summary(lines: list[dict[str, Any]], asked: list[str], dry: bool) -> dict[str, Any]:
    """Of each stage its status, how many checks it passed, those that failed and why, and its figures."""
    stages: dict[str, Any] = {}
    for name in asked:
        own = [line for line in lines if line["stage"] == name]
        end = next((line for line in own if "status" in line), {"status": "not run", "seconds": 0, "why": "cut off"})
        checks = [line for line in own if "check" in line]
        stages[name] = {
            "status": end["status"],
            "seconds": end["seconds"],
            "passed": sum(line["passed"] is True for line in checks),
            "failed": {line["check"]: line["why"] for line in checks if line["passed"] is False},
            "figures": [line["figure"] for line in own if "figure" in line],
        }
        said = [line["why"] for line in checks if line["passed"] is None] or [end["why"]]
        if end["status"] != "passed":
            stages[name]["why"] = said[0]
    bad = [name for name, one in stages.items() if one["status"] not in ("passed", "not here")]
    return {"what": "gpu", "dry": dry, "passed": not bad, "bad": bad, "stages": stages}


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of results; one that a stage was ended in is left out."""
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
    told = summary(read(args.out / "results.jsonl"), args.asked, args.dry)
    (args.out / "summary.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told))
    raise SystemExit(0 if told["passed"] else 1)
