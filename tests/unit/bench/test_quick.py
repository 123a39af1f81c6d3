"""Every bench runs `--quick` from end to end: it ends, its outputs are equal where they must be, its goals are judged.

Goals are figures of speed, so a test does not ask that they are met: it asks that each is judged, that the exit status
says whether all are met, and that a line names each one that is not.
"""

import json
from pathlib import Path

import pytest

import benchmarks.__main__  # noqa: F401 - adds its parts
from cluster.bench import command
from tests.unit.bench.test_command import parsed

OTHERS = {"peers"}  # needs vLLM; a stand-in of it is measured in cases/test_peers.py
SERVED = {"serving", "faults", "crowd", "rude", "overload"}  # each starts `aerie serve`
# Those that take a minute and more, and those of some seconds that cases/ has faster tests of.
LONG = SERVED | {"offline", "acceptance", "levels", "grammars", "lockstep", "roofline"}


def marked(part: str) -> object:
    """The part as a parameter, with the marks of what it needs, and three times as long as the help says."""
    marks = [pytest.mark.timeout(max(300, 3 * command.PARTS[part].quick_s))]
    marks += [pytest.mark.ray] if part in SERVED else []
    return pytest.param(part, marks=[*marks, pytest.mark.slow] if part in LONG else marks)


@pytest.mark.parametrize("part", [marked(part) for part in command.PARTS if part not in OTHERS])
def test_quick_bench_run_ends_and_judges_its_goals(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # One thread: on cores that other tests use too, threads of one step mostly wait for each other.
    status = command.run(parsed(part, "--quick", "--num-threads", "1", "--out", str(tmp_path)))
    result = json.loads((tmp_path / f"{part}.json").read_text(encoding="utf-8"))
    text = capsys.readouterr().out
    missed = [goal for goal in result["goals"] if not goal["met"]]
    assert bool(result["goals"]) is hasattr(command.PARTS[part].module, "goals")
    assert "DIFFERENT" not in text and "FAILED" not in text, text
    assert status == (command.EXIT_FAILED if missed else 0)
    assert all(f"MISSED {goal['what']}: " in text for goal in missed)
