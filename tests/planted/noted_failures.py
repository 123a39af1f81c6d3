"""A plugin of pytest that notes failures in the file NOTED_FAILURES, a line each: "test ID" of a test that failed, or
"import ID" of a module that cannot be imported.
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
