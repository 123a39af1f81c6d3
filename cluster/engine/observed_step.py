"""What a committed step tells the choice among adaptive trees: how long it took, and what the target accepted."""

from dataclasses import dataclass

from cluster.batch import ExtendMode
from cluster.dp_attention.facts import TreeVote
from cluster.dp_attention.tree_times import MeasuredStep
from cluster.engine.lockstep import StepInFlight
from cluster.observability.step_stats import REPLAY
from cluster.spec.result import AcceptedTree, StepOutput


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """A committed step with its `output`. `TreeOutlook` reads several of these at once. Python code that runs once
    between two steps takes three to five times as long as in a loop, because the steps push it and its data out of the
    processor's caches.

    `entries` has, for each request of the step that still ran when it was committed: its index in the output, its row
    of the block table, and the number of its committed tokens. `since_last_s` is the time in seconds since the step
    before was committed; None if this rank did not commit it. With `overlaps` the host schedules and agrees on a step
    while the device computes another one.
    """

    step: StepInFlight
    output: StepOutput
    entries: list[tuple[int, int, int]]
    since_last_s: float | None
    overlaps: bool

    @property
    def vote(self) -> TreeVote:
        """This rank's vote for the tree of the step."""
        return self.step.schedule.vote

    @property
    def tier(self) -> int:
        """The tier of the step."""
        return self.step.plan.tier

    @property
    def counts(self) -> list[int]:
        """The committed tokens of each request."""
        return [count for _, _, count in self.entries]

    @property
    def measured(self) -> MeasuredStep:
        """The time and the overhead of the step. The overhead is the time between the step before and this step. It
        includes the time in which the host schedules this step and the ranks agree on it, except with `overlaps`.
        """
        step, plan = self.step, self.step.plan
        host_s = 0.0 if self.overlaps else step.seconds["schedule"] + step.seconds["agree"]
        own_s = step.elapsed_s - host_s
        overhead_s = 0.0 if self.since_last_s is None else max(0.0, self.since_last_s - own_s)
        return MeasuredStep(plan.tier, max(plan.decodes), round(1e6 * own_s), plan.context, round(1e6 * overhead_s))

    @property
    def is_typical(self) -> bool:
        """Whether other steps with these trees and this size take about as long. This is so if the step only decoded,
        if its draft did not read tokens of earlier steps, if the step replayed its program (where such steps are
        captured), and if its overhead is known.
        """
        plan = self.step.plan
        was_captured_before = self.output.phases.names == (REPLAY,) or not plan.captured
        decodes_only = any(plan.decodes) and not any(plan.prompt_rows)
        is_usual = decodes_only and was_captured_before and plan.extend_mode is not ExtendMode.MISSED
        return is_usual and self.since_last_s is not None

    def paths(self) -> list[tuple[int, AcceptedTree]]:
        """Return the accepted path of each request, with its row of the block table."""
        return [(row, self.output.accepted_tree(i, count)) for i, row, count in self.entries]
