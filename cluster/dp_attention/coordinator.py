"""The coordinator: an object on each rank that agrees on the next step before any tensor moves.

It does not know what the rows mean; it gathers, compares headers in Python, and applies the pure plan function.
"""

from cluster.dp_attention.plan import Facts, StepPlan, make_plan
from cluster.mesh import Mesh


class OutOfStepError(RuntimeError):
    """Ranks disagree on where they are; the message names rank and field."""


class Coordinator:
    """Keeps one rank in step with its gang."""

    def __init__(self, mesh: Mesh, epoch: int = 0) -> None:
        """`epoch` counts restarts of the gang, so that a rank of an older life is recognised."""
        self._mesh, self._epoch, self._step, self._digest = mesh, epoch, 0, 0

    def agree(self, decodes: int, prompt_rows: int, num_steps: int) -> StepPlan:
        """The plan of the next step.

        Raises:
            OutOfStepError: a rank's header differs.
        """
        own = Facts(self._epoch, self._step, self._digest, decodes, prompt_rows, num_steps)
        table = [Facts(*row) for row in self._mesh.all_gather_row(own)]
        for rank, facts in enumerate(table):
            for name in ("epoch", "step", "digest"):
                if getattr(facts, name) != getattr(own, name):
                    raise OutOfStepError(
                        f"rank {rank} is at {name} {getattr(facts, name)}, rank {self._mesh.rank} at "
                        f"{getattr(own, name)} (step {self._step})"
                    )
        plan = make_plan(table)
        self._step, self._digest = self._step + 1, plan.digest
        return plan
