"""Plants one fault and runs its tests; shows that tests that found faults pass without a fault."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.planted.checkout import Copy
from tests.planted.fault import Fault
from tests.planted.results import Outcome

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.planted.noted_failures")
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)  # signals of a crash
FAST_TESTS = "not slow and not ray"  # the mark of the tests that `make test` runs in parallel


class Planter:
    """Plants faults in one copy of the checkout.

    `folder` is for the output of runs, `objects` for objects of the C compiler that later runs use again. The tests of
    one fault may take `limit_s` seconds.
    """

    def __init__(self, copy: Copy, folder: Path, objects: Path, limit_s: float) -> None:
        self._copy, self._objects, self._limit_s = copy, objects, limit_s
        self._output, self._failures = folder / "output", folder / "failures"

    def plant(self, fault: Fault) -> tuple[Outcome, str]:
        """Run the fault's tests with the fault until one fails; return the outcome, and the test or reason."""
        end = time.monotonic() + self._limit_s
        with self._copy.planted(fault):
            try:
                if fault.file.endswith((".c", ".h")):
                    complaint = self._copy.compile_kernels(self._objects, self._limit_s)
                    if complaint:
                        return "no fault", f"it does not compile: {complaint.strip().splitlines()[-1]}"
                for path in fault.tests:
                    status = self._run(("-x", path), end - time.monotonic())
                    if status != 0:
                        return self._failed(status)
            except subprocess.TimeoutExpired:
                return "unknown", f"no test failed within {self._limit_s:.0f} s"
        return "not found", "every test passed"

    def failing(self, tests: Sequence[str]) -> set[str]:
        """Run `tests` without a fault; return those that fail, or all of them if pytest could not run them."""
        status = self._run(tests, None)
        failed = {failure.partition(" ")[2] for failure in self.failures}
        return failed if status in (0, 1) else set(tests)

    @property
    def failures(self) -> list[str]:
        """The lines that the plugin `noted_failures` wrote in the last run."""
        return self._failures.read_text(encoding="utf-8").splitlines() if self._failures.exists() else []

    def _run(self, arguments: Sequence[str], limit_s: float | None) -> int:
        """Run pytest in the copy; return its exit status.

        Raises:
            subprocess.TimeoutExpired: it took longer than `limit_s` seconds.
        """
        self._failures.unlink(missing_ok=True)
        command = [sys.executable, *PYTEST, "-m", FAST_TESTS, *arguments]
        environment = self._copy.environment(NOTED_FAILURES=str(self._failures))
        with self._output.open("wb") as output:
            process = subprocess.run(
                command,
                cwd=self._copy.root,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            )
        return process.returncode

    def _failed(self, status: int) -> tuple[Outcome, str]:
        """The outcome of a fault whose run of pytest ended with a `status` other than 0, and the test or reason."""
        for failure in self.failures:
            kind, _, name = failure.partition(" ")
            return ("found", name) if kind == "test" else ("no fault", f"{name} cannot be imported")
        if status < 0:
            return "found" if -status in CRASHES else "unknown", f"the process ended by signal {-status}"
        output_lines = self._output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return (
            "no fault",
            f"pytest ended with status {status}: {output_lines[-1] if output_lines else 'it printed nothing'}",
        )
