"""Goals of a bench: a figure, the bound that it must keep, and what happens where it does not.

A bench with goals has a function `goals(result)` beside `measure` and `show`. `aerie bench` checks them after each run,
prints a line for each goal that was missed, and ends with exit status 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

QUICK_SLACK = 4.0


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal. `value` must be at least `bound`, or, without `at_least`, at most `bound`.

    `slack`: a quick run measures too little for a verdict on speed, so its bound is looser by this factor. It is 1 for
    what must hold however short the run is, such as a count of failures.
    """

    what: str
    value: float
    bound: float
    at_least: bool = False
    slack: float = QUICK_SLACK

    def bound_of(self, quick: bool) -> float:
        """The bound of a quick or a full run."""
        if not quick:
            return self.bound
        return self.bound / self.slack if self.at_least else self.bound * self.slack

    def met(self, quick: bool) -> bool:
        """Whether the figure keeps the bound of a quick or a full run; NaN does not."""
        bound = self.bound_of(quick)
        return self.value >= bound if self.at_least else self.value <= bound

    def line(self, quick: bool) -> str:
        """The figure and its bound, in one line."""
        side = "at least" if self.at_least else "at most"
        return f"{self.what}: {self.value:.4g}, goal {side} {self.bound_of(quick):.4g}"

    def facts(self, quick: bool) -> dict[str, Any]:
        """The goal as it was checked, JSON-ready."""
        side = "at_least" if self.at_least else "at_most"
        return {"what": self.what, "value": self.value, side: self.bound_of(quick), "met": self.met(quick)}


def verdict(goals: Sequence[Goal], quick: bool) -> str:
    """The lines that `aerie bench` prints below a bench's tables: what was checked, then each goal that was missed."""
    missed = [goal for goal in goals if not goal.met(quick)]
    loose = " (--quick: looser bounds)" if quick and any(goal.slack > 1 for goal in goals) else ""
    lines = [f"goals{loose}: {len(goals) - len(missed)} of {len(goals)} met"]
    return "\n".join([*lines, *(f"MISSED {goal.line(quick)}" for goal in missed)])
