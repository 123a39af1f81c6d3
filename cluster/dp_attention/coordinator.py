"""The coordinator: an object on each rank that agrees on the next step before any tensor moves.

It does not know what the rows mean; it gathers, compares headers in Python, and applies the pure plan function.
"""

from collections.abc import Sequence

from cluster.config import TreeShape
from cluster.dp_attention.plan import HEADER, Facts, PlanRule, StepPlan
from cluster.mesh import Mesh, OutOfStepError


class Coordinator:
    """Keeps one rank in step with its gang."""

    def __init__(self, mesh: Mesh, rule: PlanRule, shapes: Sequence[TreeShape]) -> None:
        """`shapes` are the trees by tier, the deepest one last."""
        self._mesh, self._rule, self._shapes = mesh, rule, shapes
        self._digest = 0
        self.step = 0

    def header(self) -> Facts:
        """This rank's facts with nothing to do, voting for the deepest tree."""
        calls = self._mesh.world.clock.calls
        return Facts(self._mesh.epoch, self.step, self._digest, calls, num_steps=len(self._shapes) - 1)

    def agree(self, facts: Facts) -> StepPlan:
        """The plan of the next step.

        Raises:
            OutOfStepError: a rank's header differs from this rank's.
        """
        self._mesh.position = (self.step, "agree")
        table = [Facts(*row) for row in self._mesh.all_gather_row(facts)]
        for rank, other in enumerate(table):
            for name in HEADER:
                self._compare(rank, name, getattr(other, name), getattr(facts, name))
        plan = self._rule.plan(table, self._shapes[-1])
        if plan.step != self.step:
            raise OutOfStepError(
                f"rank {self._mesh.rank}: the plan is for step {plan.step}, this is step {self.step}",
                self._mesh.rank,
                self.step,
                "agree",
            )
        self.step, self._digest = self.step + 1, plan.digest
        return plan

    def confirm(self, plan: StepPlan, results: int) -> None:
        """Compare what the ranks made of the facts, and what the ranks of a group made of the last step.

        Raises:
            OutOfStepError: another plan, or other tokens.
        """
        own = (plan.digest, results)
        for rank, theirs in enumerate(self._mesh.all_gather_row(own)):
            self._compare(rank, "plan", theirs[0], own[0])
            if rank // self._rule.attn_tp == self._mesh.dp_rank:
                self._compare(rank, "results", theirs[1], own[1])

    def _compare(self, rank: int, name: str, theirs: int, own: int) -> None:
        if theirs != own:
            raise OutOfStepError(
                f"rank {rank} is at {name} {theirs}, rank {self._mesh.rank} at {own} (step {self.step}, phase agree)",
                rank,
                self.step,
                "agree",
            )
