"""A pytest plugin, `-p tests.verify.plugin --ledger=FOLDER`: tests that passed on the same files are not run again.

The main process records the passes. With pytest-xdist the workers only leave out tests. Without `--ledger` the plugin
does nothing.
"""

import json
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.verify.closure import Checkout
from tests.verify.opened import OpenedFiles
from tests.verify.record import Record
from tests.verify.surroundings import surroundings

FILE = "passes.tsv"
OWN_FOLDER = "tests/verify/"
MAX_LISTED_UNRECORDED = 10
DIGESTS, SIZE, EARLIER = "ledger_digests", "ledger_size", "ledger_earlier"
"""Names of fields: the first two are in the input of a worker; the third, in its output, is how many tests it left out.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ledger")
    group.addoption("--ledger", metavar="FOLDER", help="record passes there; skip tests that passed on the same files")
    group.addoption("--ledger-summary", metavar="FILE", help="write the numbers of this run there, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--ledger")
    if not folder:
        return
    record = Record(config.rootpath / folder / FILE)
    worker_input: dict[str, Any] | None = getattr(config, "workerinput", None)
    session_plugin = (
        Recorder(config, record)
        if worker_input is None
        else Worker(config, record, worker_input[DIGESTS], worker_input[SIZE])
    )
    config.pluginmanager.register(session_plugin, "ledger-run")


class Selection:
    """Leaves out each test of which the record has a pass with the present digest of the test's module."""

    def __init__(self, config: pytest.Config, record: Record, digests: dict[str, str], size: int) -> None:
        """`digests` are by the module's path relative to the root. Only the first `size` bytes of the record count."""
        self.config, self.record, self.digests, self.size = config, record, digests, size
        self.earlier_passes = 0
        self.opened_files = OpenedFiles(config.rootpath)

    def pytest_collection_finish(self) -> None:
        self.opened_files.take()  # forget these files: the collection imports modules of all tests

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add to the report of each phase of a test which files of the checkout the phase opened."""
        report = yield
        report.ledger_opened = self.opened_files.take()  # type: ignore[attr-defined]
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None]:
        """Leave out tests after all other selections, so that only tests that would have run are counted."""
        yield
        passes = self.record.passes(self.size)
        passed = {item for item in items if (self.digests.get(module_of(item.nodeid)), item.nodeid) in passes}
        self.earlier_passes = len(passed)
        if passed:
            self.config.hook.pytest_deselected(items=[item for item in items if item in passed])
            items[:] = [item for item in items if item not in passed]


class Worker(Selection):
    """The selection in a worker of pytest-xdist: it leaves out the tests that the main process would leave out."""

    def pytest_sessionfinish(self) -> None:
        self.config.workeroutput[EARLIER] = self.earlier_passes  # type: ignore[attr-defined]


class Recorder(Selection):
    """The selection in the main process. It also records each test as soon as the test's last phase has passed."""

    def __init__(self, config: pytest.Config, record: Record) -> None:
        self.checkout = Checkout(config.rootpath)
        super().__init__(config, record, self._digests(), record.size())
        self.files = frozenset(self.checkout.files)
        self.outcomes: dict[str, set[str]] = {}
        self.opened_by: dict[str, set[str]] = {}
        self.tally: Counter[str] = Counter()
        self.failed: list[str] = []
        self.unrecorded: list[str] = []

    def _digests(self) -> dict[str, str]:
        surroundings_digest = surroundings()
        modules = (path for path in self.checkout.under("tests") if Path(path).match("test_*.py"))
        return {path: self.checkout.digest(path, surroundings_digest) for path in modules}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[DIGESTS], node.workerinput[SIZE] = self.digests, self.size

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.earlier_passes = max(self.earlier_passes, getattr(node, "workeroutput", {}).get(EARLIER, 0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has passed when its phases setup, call and teardown have passed. An expected failure is no pass."""
        outcome = "skipped" if hasattr(report, "wasxfail") else report.outcome
        outcomes = self.outcomes.setdefault(report.nodeid, set())
        outcomes |= {outcome, str(report.when)}
        if outcome == "failed" and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        self.opened_by.setdefault(report.nodeid, set()).update(getattr(report, "ledger_opened", ()))
        if report.when == "teardown":
            self._test_ended(report.nodeid, self.outcomes.pop(report.nodeid), self.opened_by.pop(report.nodeid))

    def _test_ended(self, test: str, outcomes: set[str], opened: set[str]) -> None:
        self.tally["failed" if "failed" in outcomes else "skipped" if "skipped" in outcomes else "passed"] += 1
        if outcomes != {"passed", "setup", "call", "teardown"}:
            return
        if reason := self._reason_not_to_record(module_of(test), opened):
            self.unrecorded.append(f"{test}: {reason}")
        else:
            self.record.add(self.digests[module_of(test)], test)
            self.tally["recorded"] += 1

    def _reason_not_to_record(self, module: str, opened: set[str]) -> str:
        """Why a pass of a test in this module must not be recorded; empty if it may."""
        if module not in self.digests:
            return "its module has no digest"
        closure = self.checkout.closure(module)
        if uncovered := {path for path in opened & self.files - closure if not path.startswith(OWN_FOLDER)}:
            return f"it opened {', '.join(sorted(uncovered))}, which its digest does not cover"
        return "" if self.checkout.unchanged(closure) else "a file that it depends on changed during this run"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.earlier_passes:
            session.exitstatus = pytest.ExitCode.OK
        if summary_path := self.config.getoption("--ledger-summary"):
            summary = {"earlier": self.earlier_passes, **self.tally, "failures": self.failed}
            (self.config.rootpath / summary_path).write_text(json.dumps(summary), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(
            f"ledger: {self.earlier_passes} passed earlier on the same files, {self.tally['recorded']} recorded now"
        )
        for line in self.unrecorded[:MAX_LISTED_UNRECORDED]:
            terminalreporter.write_line(f"ledger: passed, but is not recorded: {line}")
        if unlisted := self.unrecorded[MAX_LISTED_UNRECORDED:]:
            terminalreporter.write_line(f"ledger: and {len(unlisted)} more")


def module_of(test: str) -> str:
    """The path of the file in the id of a test."""
    return test.partition("::")[0]
