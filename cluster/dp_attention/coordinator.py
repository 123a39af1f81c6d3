"""The coordinator: one object per rank, with which the ranks agree on the next step before any tensor moves.

It gathers the facts that ranks tell each other about their work, and compares those that must be equal (the headers).
Then it computes the plan of the step from the facts.
"""

import zlib
from collections.abc import Callable, Sequence
from itertools import zip_longest

from cluster.batch import ExtendMode
from cluster.config.tree_shape import TreeShape, largest
from cluster.distributed.mesh import Mesh, OutOfStepError
from cluster.dp_attention.facts import GROUP_HEADER, HEADER, NO_TIER, RankFacts
from cluster.dp_attention.plan import Ops, PlanRule, ScriptCall, StepPlan, script
from cluster.dp_attention.sizes import ProgramKey
from cluster.dp_attention.tree_choice import LastTree, PostponedTrees
from cluster.dp_attention.tree_times import MeasuredStep, TreeCosts, TreeTimes


class Coordinator:
    """Keeps one rank in step with its gang (the ranks of its replica). Checksums of step inputs and results, which are
    among the facts, show if ranks have diverged.
    """

    def __init__(
        self, mesh: Mesh, rule: PlanRule, shapes: Sequence[TreeShape], target: Ops, draft: Ops | None = None
    ) -> None:
        """`shapes` are the tree shapes that steps may use; a tier is an index into them. `target` and `draft` are the
        exchange calls of the models; `draft` is None if no draft model runs.
        """
        self._mesh, self._rule, self._shapes, self._target, self._draft = mesh, rule, shapes, target, draft
        self._largest = largest(shapes)
        self._ops_checksum = zlib.crc32(repr((target, draft)).encode())
        self._plan_digest, self._last_tree = 0, LastTree()
        self.tree_times: TreeTimes | None = None
        """The step times by which trees are chosen; None until `use_costs` is called, and with fixed trees."""
        self._postponed: PostponedTrees | None = None
        self._plan: StepPlan | None = None
        self._cached_fingerprint: tuple[tuple[object, ...], int] = (), 0
        self._cached_script: tuple[tuple[object, ...], list[ScriptCall]] = (), []
        self.step = 0
        self.step_input_checksum = self.results_checksum = 0
        """The checksums of the last step input and of the last results of this rank's group; the next `header` has
        them.
        """

    def header(self) -> RankFacts:
        """Return the `RankFacts` that this rank tells the others before the next step, as if it had no work and allowed
        every tree shape. The caller adds its work, its vote, what is captured, and whether it asks to end.
        """
        return RankFacts(
            self._mesh.epoch,
            self.step,
            self._plan_digest,
            self._mesh.world.clock.collectives_returned,
            max_tier=len(self._shapes) - 1,
            rule_checksum=self._fingerprint(),
            step_input_checksum=self.step_input_checksum,
            results_checksum=self.results_checksum,
            outlook=() if self.tree_times is None else (0,) * len(self._shapes),
        )

    def use_costs(self, costs: TreeCosts, has_program: Callable[[ProgramKey], bool] | None = None) -> None:
        """Choose the tree of each later step by `costs`, which must be the same on all ranks. `has_program` says
        whether a program is captured for a key; if it is None, the choice does not depend on what is captured.
        """
        if self.tree_times is None:
            self.tree_times = TreeTimes(costs)
        else:
            self.tree_times.reset(costs)
        self._postponed = None if has_program is None else PostponedTrees(has_program)

    def agree(self, facts: RankFacts) -> StepPlan:
        """Gather the facts of all ranks, and return the plan of the next step. Call `finish_step` when that step is
        over.

        Raises:
            OutOfStepError: a rank's header differs from the others', or `finish_step` was not called for the last step.
        """
        self._mesh.enter("agree", self.step)
        if self._plan is not None:
            raise self._out_of_step_error(
                self._mesh.rank, f"agrees on step {self.step} but has not taken the one before"
            )
        facts_by_rank = [RankFacts.from_row(row) for row in self._mesh.all_gather_row(facts.to_row())]
        for name in HEADER:
            self._compare(name, [getattr(rank_facts, name) for rank_facts in facts_by_rank], range(len(facts_by_rank)))
        # Step inputs and results must be equal within a group only: different groups serve different requests.
        for leader in range(0, len(facts_by_rank), self._rule.attn_tp):
            group = range(leader, min(leader + self._rule.attn_tp, len(facts_by_rank)))
            for name in GROUP_HEADER:
                self._compare(name, [getattr(facts_by_rank[rank], name) for rank in group], group)
        self._observe(facts_by_rank[0])
        if self._postponed is not None:
            self._postponed.capture_us = facts_by_rank[0].capture_us
        plan = self._rule.plan(facts_by_rank, self._largest, self._last_tree, self.tree_times, self._postponed)
        if plan.step != self.step:
            raise self._out_of_step_error(self._mesh.rank, f"has a plan for step {plan.step} in step {self.step}")
        self.step, self._plan_digest, self._plan = self.step + 1, plan.digest, plan
        if any(plan.decodes):
            # A step that explores, or in which the draft wakes, says nothing about which tree is the best.
            was_chosen = plan.extend_mode is not ExtendMode.MISSED and all(
                facts_of_rank.explores == NO_TIER for facts_of_rank in facts_by_rank[:: self._rule.attn_tp]
            )
            tier = plan.tier if was_chosen else self._last_tree.tier
            self._last_tree = LastTree(tier, plan.extend_mode.rests)
        if self._postponed is not None:
            self._postponed.observe(plan.key, plan.lost_us)
        return plan

    def script(self) -> list[ScriptCall]:
        """Return the exchange calls of the step that `agree` has planned, in order."""
        assert self._plan is not None, "there is no script before a plan"
        plan = self._plan
        plan_key = plan.key, plan.routes_to_experts, plan.step_input_len, plan.scored, plan.empty or plan.leaving
        cache_key = plan_key, self._shapes, self._rule.attn_tp
        # Many steps have the script of the step before, so the last script is kept.
        if cache_key != self._cached_script[0]:
            shape = plan.tree(self._shapes)
            self._cached_script = cache_key, script(plan, shape, self._target, self._draft, self._rule.attn_tp > 1)
        return self._cached_script[1]

    def finish_step(self) -> None:
        """Record that the step that `agree` has planned is over. Only then `agree` may be called again."""
        self._plan = None

    def confirm(self, plan: StepPlan) -> None:
        """Check that all ranks computed the same plan. Only for debugging: it costs one more collective per step.

        Raises:
            OutOfStepError: a rank has another plan.
        """
        digests = self._mesh.all_gather_row((plan.digest,))
        self._compare("plan", [digest[0] for digest in digests], range(len(digests)))

    def _observe(self, facts: RankFacts) -> None:
        """Correct the times of trees by the step that the first rank has measured; `facts` are those of the first rank.
        All ranks use this measurement, as a step takes about as long on every rank.
        """
        if self.tree_times is not None and facts.measured_steps:
            self.tree_times.observe(
                MeasuredStep(
                    facts.measured_tier,
                    facts.measured_decodes,
                    facts.measured_us,
                    facts.measured_context,
                    facts.measured_overhead_us,
                    facts.measured_steps,
                )
            )

    def _fingerprint(self) -> int:
        """Return a checksum of all that determines plans and scripts, except the facts of this and of earlier steps.
        The checksum is computed again only if one of the objects that it covers is replaced by another object.
        """
        costs = None if self.tree_times is None else self.tree_times.costs
        inputs = self._mesh.world.size, self._mesh.attn.size, self._rule, costs, self._shapes
        if any(a is not b for a, b in zip_longest(inputs, self._cached_fingerprint[0])):
            trees = [(s.num_steps, s.topk, s.max_nodes, *s.label) for s in self._shapes]
            self._cached_fingerprint = inputs, zlib.crc32(repr((inputs[:4], trees, self._ops_checksum)).encode())
        return self._cached_fingerprint[1]

    def _compare(self, name: str, values: list[int], ranks: range) -> None:
        """Raise unless all values are equal. The error names the first rank that differs from the most common value.
        Among equally common values, that of the lowest rank counts as right.
        """
        if len(set(values)) == 1:
            return
        majority = max(values, key=values.count)
        odd_index = next(i for i, value in enumerate(values) if value != majority)
        majority_rank = ranks[values.index(majority)]
        raise self._out_of_step_error(
            ranks[odd_index], f"is at {name} {values[odd_index]}, rank {majority_rank} at {majority}"
        )

    def _out_of_step_error(self, rank: int, problem: str) -> OutOfStepError:
        step = self.step if self._plan is None else self._plan.step
        return OutOfStepError(f"rank {rank} {problem} (step {step}, phase agree)", rank, step, "agree")
