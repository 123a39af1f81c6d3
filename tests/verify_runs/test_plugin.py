"""The plugin in separate runs of pytest: which passes it records, which tests it skips, and which it never records."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.verify.record import Record
from tests.verify_runs.trees import rewrite, with_ledger

PLUGIN = ("-p", "tests.verify.plugin", "--ledger=.verify", "--ledger-summary=numbers.json", "-p", "no:cacheprovider")
RECORDED = ".verify/passes.tsv"


@pytest.fixture
def small_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # other plugins take most of the time to start
    return with_ledger(tmp_path)


def start(root: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "pytest", "-q", *PLUGIN, *arguments]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(root: Path, *arguments: str) -> dict[str, Any]:
    """The numbers of one run of pytest, with its exit status and its output."""
    (root / "numbers.json").unlink(missing_ok=True)
    process = start(root, *(arguments or ("tests/of", "tests/other")))
    printed, _ = process.communicate(timeout=60)
    numbers: dict[str, Any] = json.loads((root / "numbers.json").read_text(encoding="utf-8"))
    return {"passed": 0, "failed": 0, "skipped": 0, **numbers, "status": process.returncode, "printed": printed}


def counts_and_status(numbers: dict[str, Any]) -> tuple[int, int, int, int]:
    return numbers["earlier"], numbers["passed"], numbers["failed"], numbers["status"]


def test_passed_test_is_not_rerun_on_the_same_files(small_checkout: Path) -> None:
    assert counts_and_status(run(small_checkout)) == (0, 3, 0, 0)
    again = run(small_checkout)
    assert counts_and_status(again) == (3, 0, 0, 0), "no test was left to run, which is not an error"
    assert "3 passed earlier on the same files" in again["printed"]
    rewrite(small_checkout, {"cluster/far.py": "VALUE = 2\n"})
    assert counts_and_status(run(small_checkout)) == (1, 2, 0, 0), "test_two.py does not depend on the changed file"
    rewrite(small_checkout, {"cluster/far.py": "VALUE = 1\n"})
    assert counts_and_status(run(small_checkout)) == (3, 0, 0, 0), "the file has its first content again"


def test_failed_skipped_and_xfailed_tests_run_again(small_checkout: Path) -> None:
    """One test fails, one fails in its teardown, one is skipped, one fails as expected, and only the last passes."""
    source = """
        import pytest

        @pytest.fixture
        def torn():
            yield
            raise OSError

        def test_fails():
            assert False

        def test_fails_at_its_end(torn):
            pass

        def test_skips():
            pytest.skip("no GPU")

        @pytest.mark.xfail
        def test_is_expected_to_fail():
            assert False

        def test_passes():
            pass
    """
    rewrite(small_checkout, {"tests/other/test_two.py": "\n".join(line[8:] for line in source.splitlines())})
    first = run(small_checkout, "tests/other")
    assert counts_and_status(first) == (0, 1, 2, 1) and first["skipped"] == 2
    assert [name.rpartition("::")[2] for name in first["failures"]] == ["test_fails", "test_fails_at_its_end"]
    second = run(small_checkout, "tests/other")
    assert counts_and_status(second) == (1, 0, 2, 1) and second["skipped"] == 2


def test_killed_run_keeps_recorded_passes(small_checkout: Path) -> None:
    waiting_source = "import time\n\ndef test_first():\n    pass\n\ndef test_waits():\n    time.sleep(60)\n"
    rewrite(small_checkout, {"tests/other/test_two.py": waiting_source})
    process, deadline = start(small_checkout, "tests/other"), time.monotonic() + 60
    while not ((small_checkout / RECORDED).exists() and (small_checkout / RECORDED).stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert counts_and_status(run(small_checkout, "tests/other", "-k", "first")) == (1, 0, 0, 0)


def test_run_records_no_pass_if_its_files_change_meanwhile(small_checkout: Path) -> None:
    """The test loads the new content of the file, but its digest is of the old content."""
    editing_source = (
        "from pathlib import Path\n\ndef test_edits():\n    Path('cluster/far.py').write_text('VALUE = 3')\n"
    )
    rewrite(small_checkout, {"tests/of/test_one.py": editing_source + "    import cluster.near\n"})
    first = run(small_checkout, "tests/of")
    assert counts_and_status(first) == (0, 1, 0, 0) and "changed during this run" in first["printed"]
    assert not (small_checkout / RECORDED).exists()


def test_pass_is_not_recorded_if_test_opened_a_file_outside_its_digest(small_checkout: Path) -> None:
    reading_source = "def test_reads():\n    open('do' + 'cs/page.md').close()\n\ndef test_reads_nothing():\n    pass\n"
    rewrite(small_checkout, {"tests/other/test_two.py": reading_source})
    first = run(small_checkout, "tests/other")
    assert counts_and_status(first) == (0, 2, 0, 0) and "opened docs/page.md" in first["printed"]
    assert counts_and_status(run(small_checkout, "tests/other")) == (1, 1, 0, 0)


def test_changed_environment_variable_runs_all_tests_again(
    small_checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLAP", "0")
    assert counts_and_status(run(small_checkout)) == (0, 3, 0, 0)
    monkeypatch.setenv("OVERLAP", "1")
    assert counts_and_status(run(small_checkout)) == (0, 3, 0, 0)
    monkeypatch.setenv("OVERLAP", "0")
    assert counts_and_status(run(small_checkout)) == (3, 0, 0, 0)


def test_xdist_workers_skip_recorded_passes_and_the_controller_records(small_checkout: Path) -> None:
    xdist_arguments = ("-p", "xdist", "-n", "2", "--dist", "worksteal", "tests/of", "tests/other")
    assert counts_and_status(run(small_checkout, *xdist_arguments)) == (0, 3, 0, 0)
    assert counts_and_status(run(small_checkout, *xdist_arguments)) == (3, 0, 0, 0)
    rewrite(
        small_checkout,
        {"cluster/near.py": "VALUE = 1\n", "tests/other/test_two.py": "def test_c():\n    assert False\n"},
    )
    assert counts_and_status(run(small_checkout, *xdist_arguments)) == (0, 2, 1, 1)
    assert counts_and_status(run(small_checkout)) == (2, 0, 1, 1)


def test_truncated_ledger_line_is_not_read_as_a_pass(tmp_path: Path) -> None:
    record = Record(tmp_path / "passes.tsv")
    record.add("d1", "tests/test_a.py::test_long[1]")
    record.path.write_bytes(record.path.read_bytes() + b"d2\ttests/test_a.py::test_long")
    assert record.passes(record.size()) == {("d1", "tests/test_a.py::test_long[1]")}
    record.add("d3", "tests/test_a.py::test_other")
    record.add("d4", "tests/test_a.py::test_last")
    assert record.passes(record.size()) == {
        ("d1", "tests/test_a.py::test_long[1]"),
        ("d4", "tests/test_a.py::test_last"),
    }
