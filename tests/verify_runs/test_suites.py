"""`python -m tests.verify` runs the next suite after a failed suite, and names the failed test."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verify.suites import SUITES
from tests.verify_runs.trees import rewrite, with_ledger

ROOT = Path(__file__).resolve().parents[2]
SUITES_SOURCE = """
from tests.verify.suites_of_the_checkout import Suite

SUITES = (
    Suite("first", ("tests/of",), side_by_side=False, variables={"OVERLAP": "1"}),
    Suite("second", ("tests/other",), side_by_side=False),
    Suite("third", ("tests/other", "-k", "nothing"), side_by_side=False, by_default=False),
)
"""
FAILING_MODULE = "import os\n\ndef test_a():\n    assert os.environ['OVERLAP'] == '0'\n\ndef test_b():\n    pass\n"


def small_checkout(root: Path) -> Path:
    with_ledger(root)
    ledger = root / "tests" / "verify"
    (ledger / "suites.py").rename(ledger / "suites_of_the_checkout.py")
    return rewrite(root, {"tests/verify/suites.py": SUITES_SOURCE, "tests/of/test_one.py": FAILING_MODULE})


def run(root: Path, *arguments: str) -> tuple[int, dict[str, list[int]], str]:
    """The exit status, the numbers of each row of the table without the seconds, and the whole output."""
    command = [sys.executable, "-m", "tests.verify", *arguments]
    process = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    rows = re.findall(r"^ *(first|second|third|all)((?: +\d+){6})$", process.stdout, re.MULTILINE)
    return process.returncode, {name: [int(number) for number in row.split()][:5] for name, row in rows}, process.stdout


def test_next_suite_runs_after_a_failed_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # other plugins take most of the time to start
    root = small_checkout(tmp_path)
    status, rows, printed = run(root)
    assert status == 1 and "FAILED tests/of/test_one.py::test_a" in printed
    assert rows == {"first": [2, 1, 0, 1, 0], "second": [1, 1, 0, 0, 0], "all": [3, 2, 0, 1, 0]}
    rewrite(root, {"tests/of/test_one.py": FAILING_MODULE.replace("'0'", "'1'")})
    status, rows, _ = run(root)
    assert status == 0
    assert rows == {"first": [2, 2, 0, 0, 0], "second": [0, 0, 1, 0, 0], "all": [2, 2, 1, 0, 0]}
    status, rows, _ = run(root, "--fresh", "second")
    assert (status, rows["all"]) == (0, [1, 1, 0, 0, 0])
    status, rows, printed = run(root, "third")
    assert status == 1 and "FAILED third: pytest ended with status 5" in printed, "a suite without tests fails"


def test_every_suite_has_existing_paths_and_a_unique_name() -> None:
    paths = [word.removeprefix("--ignore=") for suite in SUITES for word in suite.arguments if "tests" in word]
    assert paths and [name for name in paths if not (ROOT / name).exists()] == []
    assert len({suite.name for suite in SUITES}) == len(SUITES)
