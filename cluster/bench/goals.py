"""Goals of a measurement: figures and the bounds that they must keep.

A part of `aerie bench` that has goals has a function `goals(result)` beside `measure` and `show`. `aerie bench` checks
the goals after each part and prints a line for each missed goal. After the last part it exits with status 1 if a goal
was missed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

QUICK_SLACK = 4.0


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal for the figure `name`: `value` must be at most `bound`; if `at_least`, at least `bound`.

    A quick run measures too little to judge speed, so its bound is looser by the factor `slack`. Figures that must hold
    in any run, such as a count of failures, have a slack of 1.
    """

    name: str
    value: float
    bound: float
    at_least: bool = False
    slack: float = QUICK_SLACK

    def bound_of(self, quick: bool) -> float:
        """Return the bound of a full run or, if `quick`, of a quick run."""
        if not quick:
            return self.bound
        return self.bound / self.slack if self.at_least else self.bound * self.slack

    def is_met(self, quick: bool) -> bool:
        """Return whether `value` keeps the bound that `bound_of` returns. A `value` of NaN never keeps a bound."""
        bound = self.bound_of(quick)
        return self.value >= bound if self.at_least else self.value <= bound

    def as_json(self, quick: bool) -> dict[str, Any]:
        """Return the goal as it was checked, JSON-ready."""
        relation = "at_least" if self.at_least else "at_most"
        return {"what": self.name, "value": self.value, relation: self.bound_of(quick), "met": self.is_met(quick)}


def goal_summary(goals: Sequence[Goal], quick: bool) -> str:
    """Return the lines printed below the tables of a part: how many goals were met, then each missed goal."""
    missed = [goal for goal in goals if not goal.is_met(quick)]
    slack_note = " (--quick: looser bounds)" if quick and any(goal.slack > 1 for goal in goals) else ""
    lines = [f"goals{slack_note}: {len(goals) - len(missed)} of {len(goals)} met"]
    for goal in missed:
        relation = "at least" if goal.at_least else "at most"
        lines.append(f"MISSED {goal.name}: {goal.value:.4g}, goal {relation} {goal.bound_of(quick):.4g}")
    return "\n".join(lines)
