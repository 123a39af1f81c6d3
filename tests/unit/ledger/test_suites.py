"""`python -m tests.ledger`: it goes on after a suite that failed, and says which test it was."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ledger.suites import SUITES
from tests.unit.ledger.trees import rewrite, with_ledger

ROOT = Path(__file__).resolve().parents[3]
TWO = """
from tests.ledger.suites_of_the_checkout import Suite

SUITES = (
    Suite("first", ("tests/of",), side_by_side=False, variables={"OVERLAP": "1"}),
    Suite("second", ("tests/other",), side_by_side=False),
    Suite("third", ("tests/other", "-k", "nothing"), side_by_side=False, by_default=False),
)
"""
BROKEN = "import os\n\ndef test_a():\n    assert os.environ['OVERLAP'] == '0'\n\ndef test_b():\n    pass\n"


def small(root: Path) -> Path:
    with_ledger(root)
    ledger = root / "tests" / "ledger"
    (ledger / "suites.py").rename(ledger / "suites_of_the_checkout.py")
    return rewrite(root, {"tests/ledger/suites.py": TWO, "tests/of/test_one.py": BROKEN})


def run(root: Path, *arguments: str) -> tuple[int, dict[str, list[int]], str]:
    """The exit status, the numbers of each row of the table but the seconds, and all that was printed."""
    command = [sys.executable, "-m", "tests.ledger", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    rows = re.findall(r"^ *(first|second|third|all)((?: +\d+){6})$", done.stdout, re.MULTILINE)
    return done.returncode, {name: [int(each) for each in row.split()][:5] for name, row in rows}, done.stdout


def test_next_suite_runs_after_a_failed_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # other plugins take most of the time to start
    root = small(tmp_path)
    status, rows, printed = run(root)
    assert status == 1 and "FAILED tests/of/test_one.py::test_a" in printed
    assert rows == {"first": [2, 1, 0, 1, 0], "second": [1, 1, 0, 0, 0], "all": [3, 2, 0, 1, 0]}
    rewrite(root, {"tests/of/test_one.py": BROKEN.replace("'0'", "'1'")})
    status, rows, _ = run(root)
    assert status == 0
    assert rows == {"first": [2, 2, 0, 0, 0], "second": [0, 0, 1, 0, 0], "all": [2, 2, 1, 0, 0]}
    status, rows, _ = run(root, "--fresh", "second")
    assert (status, rows["all"]) == (0, [1, 1, 0, 0, 0])
    status, rows, printed = run(root, "third")
    assert status == 1 and "FAILED third: pytest ended with status 5" in printed, "a suite without a test is a mistake"


def test_every_suite_has_existing_paths_and_a_unique_name() -> None:
    named = [word.removeprefix("--ignore=") for suite in SUITES for word in suite.arguments if "tests" in word]
    assert named and [name for name in named if not (ROOT / name).exists()] == []
    assert len({suite.name for suite in SUITES}) == len(SUITES)
