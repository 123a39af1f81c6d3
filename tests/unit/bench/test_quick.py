"""Every bench runs `--quick` from end to end: it ends, its outputs are equal where they must be, its goals are judged.

Goals are figures of speed, so a test does not ask that they are met: it asks that each is judged, that the exit status
says whether all are met, and that a line names each one that is not.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.bench import command
from tests.unit.bench.test_command import parsed

ALONE = ("offline", "acceptance", "levels", "grammars", "roofline", "overlap", "kernels", "cache", "packed", "radix")
OF_RANKS = ("lockstep",)
OF_SERVERS = ("serving", "faults", "crowd", "rude", "overload", "strain")
OTHERS = ("peers",)  # needs vLLM; a stand-in of it is measured in cases/test_peers.py


def quick(part: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The result of a quick run, whose exit status and lines have been held to it."""
    status = command.run(parsed(part, "--quick", "--out", str(folder)))
    result: dict[str, Any] = json.loads((folder / f"{part}.json").read_text(encoding="utf-8"))
    text = capsys.readouterr().out
    missed = [goal for goal in result["goals"] if not goal["met"]]
    assert bool(result["goals"]) is hasattr(command.PARTS[part], "goals")
    assert status == (command.MISSED if missed else 0), "nothing but goals of speed may be missed"
    for goal in missed:
        assert f"MISSED {goal['what']}: " in text
    return result


def test_every_part_is_among_them() -> None:
    assert sorted([*ALONE, *OF_RANKS, *OF_SERVERS, *OTHERS]) == sorted(command.PARTS)


@pytest.mark.parametrize("part", ALONE)
def test_a_quick_run_ends(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick(part, tmp_path, capsys)
