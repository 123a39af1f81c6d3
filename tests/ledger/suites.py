"""The slow suites, how each runs on its own, and in which order `make verify` runs them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Suite:
    """Arguments of pytest and variables of a suite.

    `side_by_side`: one process for each core, at most four, share its tests, each on one thread. Else one process runs
    all of them. `variables` replace those of the environment. `by_default`: whether it runs when no suite is named.
    """

    name: str
    arguments: tuple[str, ...]
    side_by_side: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)
    by_default: bool = True

    @property
    def options(self) -> list[str]:
        """The arguments of pytest."""
        share = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"] if self.side_by_side else []
        return [*share, *self.arguments]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the suite sets."""
        return {**({"OMP_NUM_THREADS": "1"} if self.side_by_side else {}), **self.variables}


TIMED = ("tests/ranks/test_divergence.py", "tests/ranks/test_supervision.py")
"""Modules that run alone: they assert that a lost rank is named within seconds, that a sleeping one uses no CPU time.

The other tests of ranks compare tokens. Each worker of pytest-xdist starts its own gangs, whose processes compute on
one thread and meet at ports that the system chooses, so two workers do not disturb each other.
"""

FOLDERS = ("kernels", "ranks", "triton", "flashinfer", "static", "parity")
ELSEWHERE = ("tests", *(f"--ignore=tests/{folder}" for folder in FOLDERS))

SUITES = (
    Suite("kernels", ("tests/kernels",), side_by_side=False),
    Suite("ranks-timed", TIMED, side_by_side=False),
    Suite("ranks", ("tests/ranks", *(f"--ignore={module}" for module in TIMED))),
    Suite("triton", ("tests/triton", "tests/flashinfer"), variables={"TRITON_INTERPRET": "1"}),
    Suite("static", ("tests/static",)),
    Suite("parity", ("tests/parity",)),
    Suite("elsewhere", ("-m", "slow and not ray", *ELSEWHERE), by_default=False),
    Suite("ray", ("-m", "slow and ray", *ELSEWHERE), side_by_side=False, by_default=False),
)
