"""The slow suites in the order in which `make verify` runs them, and the way in which each runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Suite:
    """One suite: its arguments for pytest and its environment variables.

    If `side_by_side`, several processes share the tests, each on one thread: one process for each core, at most four.
    Otherwise one process runs all tests. `variables` replace those of the environment. `by_default`: whether the suite
    runs when the command line names no suite.
    """

    name: str
    arguments: tuple[str, ...]
    side_by_side: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)
    by_default: bool = True

    @property
    def options(self) -> list[str]:
        """The arguments of pytest."""
        xdist_options = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"] if self.side_by_side else []
        return [*xdist_options, *self.arguments]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the suite sets."""
        return {**({"OMP_NUM_THREADS": "1"} if self.side_by_side else {}), **self.variables}


TIMED = ("tests/distributed/test_divergence.py", "tests/distributed/test_supervision.py")
"""Test modules that run alone, because they measure time: a lost rank must be named within seconds, and a sleeping rank
must use no CPU time.

The other tests of ranks compare tokens and may run in parallel. Each worker of pytest-xdist starts its own gangs. The
processes of a gang compute on one thread and use ports that the system chooses, so workers do not disturb each other.
"""

TIMED_WITH_RAY = ("tests/serving/actors/test_faults.py",)
"""The test modules with Ray that measure how soon a loss is noticed."""

FOLDERS = ("kernels", "distributed", "triton", "flashinfer", "capture", "parity")
ELSEWHERE = ("tests", *(f"--ignore=tests/{folder}" for folder in FOLDERS))

SUITES = (
    Suite("kernels", ("tests/kernels",), side_by_side=False),
    Suite("distributed-timed", TIMED, side_by_side=False, variables={"TIMED": "1"}),
    Suite("distributed", ("tests/distributed", *(f"--ignore={module}" for module in TIMED))),
    Suite("triton", ("tests/triton", "tests/flashinfer"), variables={"TRITON_INTERPRET": "1"}),
    Suite("capture", ("tests/capture",)),
    Suite("parity", ("tests/parity",)),
    Suite("elsewhere", ("-m", "slow and not ray", *ELSEWHERE), by_default=False),
    Suite("ray", ("-m", "slow and ray", *ELSEWHERE), side_by_side=False, variables={"TIMED": "1"}, by_default=False),
    Suite("ray-timed", ("-m", "ray", *TIMED_WITH_RAY), side_by_side=False, variables={"TIMED": "1"}, by_default=False),
)
