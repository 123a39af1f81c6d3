"""A plugin of pytest, `-p tests.ledger.plugin --ledger=FOLDER`: tests that passed on the same files are not run again.

The process that is asked for the run records; with pytest-xdist its workers only leave out. Without `--ledger` the
plugin does nothing.
"""

import json
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.ledger.closure import Checkout
from tests.ledger.opened import Opened
from tests.ledger.record import Record
from tests.ledger.surroundings import surroundings

FILE = "passes.tsv"
OWN = "tests/ledger/"
KEPT_OUT_SHOWN = 10
DIGESTS, SIZE, EARLIER = "ledger_digests", "ledger_size", "ledger_earlier"
"""Fields of what a worker is given, and how many tests it has left out, which it gives back."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ledger")
    group.addoption("--ledger", metavar="FOLDER", help="record passes there; leave out what passed on the same files")
    group.addoption("--ledger-summary", metavar="FILE", help="write the numbers of this run there, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--ledger")
    if not folder:
        return
    record = Record(config.rootpath / folder / FILE)
    given: dict[str, Any] | None = getattr(config, "workerinput", None)
    own = Recorder(config, record) if given is None else Worker(config, record, given[DIGESTS], given[SIZE])
    config.pluginmanager.register(own, "ledger-run")


class Selection:
    """Leaves out the tests of which there is a pass with the digest that their module has now."""

    def __init__(self, config: pytest.Config, record: Record, digests: dict[str, str], size: int) -> None:
        """`digests` by path of a module relative to the root. Of the record the first `size` bytes count."""
        self.config, self.record, self.digests, self.size = config, record, digests, size
        self.earlier = 0
        self.opened = Opened(config.rootpath)

    def pytest_collection_finish(self) -> None:
        self.opened.taken()  # collecting imports modules that other tests need

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Tell with each phase which files of the checkout it opened."""
        report = yield
        report.ledger_opened = self.opened.taken()  # type: ignore[attr-defined]
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None]:
        """After all other selections, so that what is counted is what would have run."""
        yield
        passes = self.record.passes(self.size)
        passed = {item for item in items if (self.digests.get(module_of(item.nodeid)), item.nodeid) in passes}
        self.earlier = len(passed)
        if passed:
            self.config.hook.pytest_deselected(items=[item for item in items if item in passed])
            items[:] = [item for item in items if item not in passed]


class Worker(Selection):
    """What a worker of pytest-xdist does: it leaves out what the process that started it would leave out."""

    def pytest_sessionfinish(self) -> None:
        self.config.workeroutput[EARLIER] = self.earlier  # type: ignore[attr-defined]


class Recorder(Selection):
    """Records each test as soon as its last phase has passed."""

    def __init__(self, config: pytest.Config, record: Record) -> None:
        self.checkout = Checkout(config.rootpath)
        super().__init__(config, record, self._digests(), record.size())
        self.files = frozenset(self.checkout.files)
        self.outcomes: dict[str, set[str]] = {}
        self.opened_by: dict[str, set[str]] = {}
        self.tally: Counter[str] = Counter()
        self.failed: list[str] = []
        self.kept_out: list[str] = []

    def _digests(self) -> dict[str, str]:
        around = surroundings()
        modules = (path for path in self.checkout.under("tests") if Path(path).match("test_*.py"))
        return {path: self.checkout.digest(path, around) for path in modules}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[DIGESTS], node.workerinput[SIZE] = self.digests, self.size

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.earlier = max(self.earlier, getattr(node, "workeroutput", {}).get(EARLIER, 0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has passed when its phases setup, call and teardown have; an expected failure is no pass."""
        outcome = "skipped" if hasattr(report, "wasxfail") else report.outcome
        outcomes = self.outcomes.setdefault(report.nodeid, set())
        outcomes |= {outcome, str(report.when)}
        if outcome == "failed" and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        self.opened_by.setdefault(report.nodeid, set()).update(getattr(report, "ledger_opened", ()))
        if report.when == "teardown":
            self._ended(report.nodeid, self.outcomes.pop(report.nodeid), self.opened_by.pop(report.nodeid))

    def _ended(self, test: str, outcomes: set[str], opened: set[str]) -> None:
        self.tally["failed" if "failed" in outcomes else "skipped" if "skipped" in outcomes else "passed"] += 1
        if outcomes != {"passed", "setup", "call", "teardown"}:
            return
        if doubt := self._doubt(module_of(test), opened):
            self.kept_out.append(f"{test}: {doubt}")
        else:
            self.record.add(self.digests[module_of(test)], test)
            self.tally["recorded"] += 1

    def _doubt(self, module: str, opened: set[str]) -> str:
        """Why a pass of a test in this module must not be recorded; empty if it may."""
        if module not in self.digests:
            return "its module has no digest"
        closure = self.checkout.closure(module)
        if missed := {path for path in opened & self.files - closure if not path.startswith(OWN)}:
            return f"it opened {', '.join(sorted(missed))}, which its digest does not cover"
        return "" if self.checkout.unchanged(closure) else "a file that it depends on changed during this run"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.earlier:
            session.exitstatus = pytest.ExitCode.OK
        if to := self.config.getoption("--ledger-summary"):
            summary = {"earlier": self.earlier, **self.tally, "failures": self.failed}
            (self.config.rootpath / to).write_text(json.dumps(summary), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(
            f"ledger: {self.earlier} passed earlier on the same files, {self.tally['recorded']} recorded now"
        )
        for line in self.kept_out[:KEPT_OUT_SHOWN]:
            terminalreporter.write_line(f"ledger: passed, but is not recorded: {line}")
        if more := self.kept_out[KEPT_OUT_SHOWN:]:
            terminalreporter.write_line(f"ledger: and {len(more)} more")


def module_of(test: str) -> str:
    """The path of the file in the id of a test."""
    return test.partition("::")[0]
