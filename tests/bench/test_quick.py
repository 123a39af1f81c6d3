"""Every bench runs with `--quick` from end to end: it ends, its outputs are equal where they must be, and it judges its
goals.

Goals are speeds, so this test does not require that they are met. It requires that the bench judges each goal, that the
exit status says whether all goals are met, and that the output names each missed goal.
"""

import json
from pathlib import Path

import pytest

import benchmarks.__main__  # noqa: F401 - the import adds parts to command.PARTS
from cluster.bench import command
from tests.unit.bench.test_command import parse_arguments

NEEDS_VLLM = {"peers"}  # needs vLLM; cases/test_peers.py measures a stand-in of vLLM
STARTS_SERVER = {"serving", "faults", "crowd", "rude", "overload"}  # each starts `aerie serve`
# Parts that take a minute or more, and parts that take some seconds and have faster tests in cases/.
SLOW_PARTS = STARTS_SERVER | {"offline", "acceptance", "adaptive", "levels", "grammars", "lockstep", "roofline"}


def part_parameter(part: str) -> object:
    """The part as a pytest parameter. Its marks say what it needs; its timeout is three times the duration in the help,
    and at least 1200 s.
    """
    marks = [pytest.mark.timeout(max(1200, 3 * command.PARTS[part].quick_s))]
    marks += [pytest.mark.ray] if part in STARTS_SERVER else []
    return pytest.param(part, marks=[*marks, pytest.mark.slow] if part in SLOW_PARTS else marks)


@pytest.mark.parametrize("part", [part_parameter(part) for part in command.PARTS if part not in NEEDS_VLLM])
def test_quick_bench_run_ends_and_judges_its_goals(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # One thread: other tests use the cores too, and several threads of one step would mostly wait for each other.
    status = command.run(parse_arguments(part, "--quick", "--num-threads", "1", "--out", str(tmp_path)))
    result = json.loads((tmp_path / f"{part}.json").read_text(encoding="utf-8"))
    text = capsys.readouterr().out
    missed_goals = [goal for goal in result["goals"] if not goal["met"]]
    assert bool(result["goals"]) is hasattr(command.PARTS[part].module, "goals")
    assert "DIFFERENT" not in text and "FAILED" not in text, text
    assert status == (command.EXIT_FAILED if missed_goals else 0)
    assert all(f"MISSED {goal['what']}: " in text for goal in missed_goals)
