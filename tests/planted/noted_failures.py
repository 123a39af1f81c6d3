"""A pytest plugin that appends each failure as a line to the file named by the environment variable NOTED_FAILURES:
"test ID" for a test that failed, "import ID" for a module that cannot be imported.
"""

import os
from pathlib import Path

import pytest


def _note(kind: str, name: str) -> None:
    with Path(os.environ["NOTED_FAILURES"]).open("a", encoding="utf-8") as file:
        file.write(f"{kind} {name}\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _note("test", report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note("import", report.nodeid)
