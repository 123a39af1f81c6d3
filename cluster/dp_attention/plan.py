"""The plan of a step: what all ranks do in it. It depends only on what all ranks know (the facts that they gathered for
this and for earlier steps), so every rank computes the same plan.

Legend: per attention group (data-parallel rank) R decoding requests, c prompt rows, F finishing prompts; N nodes of a
tree, S its levels.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Literal, NamedTuple

from cluster.batch import ExtendMode, SamplingMode
from cluster.config.speculation import MISSED_TOKENS
from cluster.config.tree_shape import TreeShape
from cluster.dp_attention.facts import NO_TIER, RankFacts
from cluster.dp_attention.sizes import Buckets, ProgramKey, Sizes, max_sizes
from cluster.dp_attention.tree_choice import NO_LAST_TREE, ChosenTier, LastTree, PostponedTrees, choose_tier
from cluster.dp_attention.tree_times import TreeTimes, rounded
from cluster.models.exchange import EXPERT_CALLS
from cluster.sampling.sampler import TOP_LOGPROBS
from cluster.sampling.sharded import NUMBERS_PER_CHOICE, ShardedHead, numbers_sent_per_row

Padding = Literal["auto", "padded", "exact"]


class StepPlan(NamedTuple):
    """The work of all ranks in one step. Entry g of each tuple belongs to attention group g.

    `decodes`, `prompt_rows` and `finishing_prompts` count the requests, rows and prompts of each group without padding;
    `sizes` are the same counts with padding, as the step runs them. `scored` counts the prompt rows that return
    log-probabilities. `step_input_len` and `decode_us` are those of the group leaders' `RankFacts`. `captured` says
    whether the step may be captured, or replayed, as the program of its `key`. `tier` is the index of the step's tree
    among the tree shapes that steps may use. `forced_nodes` nodes of each tree are reserved for tokens that a grammar
    forces. `mode` is the union of all groups' sampling modes. `no_requests` says that no rank has requests, `leaving`
    that the gang (the ranks of this replica) ends with this step. `routes_to_experts` is for expert-parallel experts.
    If it is True, the ranks first exchange counts, and each row then goes only to the parts that hold its experts.
    Otherwise every row goes to every part. `extend_mode` says which rows the draft reads. `context` is the largest of
    the groups' mean numbers of committed tokens per decoding request. `lost_us` is as in `ChosenTier`, but 0 in a step
    in which the draft reads the tokens that it has missed (`ExtendMode.MISSED`).
    """

    step: int
    decodes: tuple[int, ...]
    prompt_rows: tuple[int, ...]
    finishing_prompts: tuple[int, ...]
    step_input_len: tuple[int, ...]
    sizes: tuple[Sizes, ...]
    captured: bool
    tier: int
    no_requests: bool
    leaving: bool
    decode_us: tuple[int, ...]
    mode: SamplingMode = SamplingMode(0)
    scored: tuple[int, ...] = ()
    forced_nodes: int = 0
    routes_to_experts: bool = False
    extend_mode: ExtendMode = ExtendMode.ACCEPTED
    context: int = 0
    lost_us: int = 0

    @property
    def empty(self) -> bool:
        """Whether no group has a row. Nothing runs then, and ranks with requests wait for the results of steps that
        have begun.
        """
        return not (any(self.decodes) or any(self.prompt_rows))

    @property
    def digest(self) -> int:
        """A checksum of this plan. Ranks compare it in the facts that they gather for the next step."""
        return zlib.crc32(repr(tuple(self)).encode())

    def tree(self, shapes: Sequence[TreeShape]) -> TreeShape:
        """The tree of the step, with `forced_nodes` nodes for grammars. `shapes` are the tree shapes by tier."""
        return shapes[self.tier].with_forced_nodes(self.forced_nodes)

    @property
    def key(self) -> ProgramKey:
        """The key of the step's program, but always with buffer set 0."""
        return ProgramKey(self.tier, self.forced_nodes, int(self.mode), self.sizes, self.extend_mode)

    def idle(self, group: int) -> Sizes:
        """The padding of a group: its numbers of idle requests, idle prompt rows and idle finishing prompts."""
        sizes = self.sizes[group]
        return Sizes(
            sizes.decodes - self.decodes[group],
            sizes.prompt_rows - self.prompt_rows[group],
            sizes.finishing_prompts - self.finishing_prompts[group],
        )


@dataclass(frozen=True, slots=True)
class PlanRule:
    """The settings that determine the plan besides the facts; the same on every rank.

    `max_idle_share` is for padding `auto`: a step is padded if at most this share of its rows would be idle (padding).
    On a GPU it is one half: with padding all groups exchange equally many rows and share one program, which saves more
    time than the idle rows cost. On a CPU it is 0. `buckets` are the sizes of captured programs, None if nothing is
    captured. A group may use at most `max_forced_rows` rows for forced nodes (tree nodes for tokens that a grammar
    forces). By default the limit is high on a GPU, where more rows cost little, and low on a CPU. `expert_parallel`
    says that experts are expert-parallel, so that `StepPlan.routes_to_experts` may be True. `draft_rests` says that in
    steps without trees the draft rests: it does not read the tokens of decoding requests, and catches up later. Tiers
    after `last_drafted_tier` have looked-up tokens (found by matching the end of the text in earlier text); if it is
    None, no tier has.
    """

    attn_tp: int
    padding: Padding
    max_idle_share: float
    buckets: Buckets | None = None
    max_forced_rows: int = 0
    expert_parallel: bool = False
    draft_rests: bool = False
    last_drafted_tier: int | None = None

    def plan(
        self,
        facts_by_rank: Sequence[RankFacts],
        shape: TreeShape,
        last: LastTree = NO_LAST_TREE,
        times: TreeTimes | None = None,
        postponed: PostponedTrees | None = None,
    ) -> StepPlan:
        """Return the plan that follows from the facts of all ranks. The facts of a group are those of its leader.
        `shape` is the largest tree, `last` describes the last step in which requests decoded. `times` are the step
        times by which adaptive trees are chosen; if it is None, a step uses the last tier that all groups allow.
        `postponed` says which programs a captured step may use; if it is None, it may use all.
        """
        groups = facts_by_rank[:: self.attn_tp]
        needed = tuple(Sizes(facts.decodes, facts.prompt_rows, facts.finishing_prompts) for facts in groups)
        mode = SamplingMode(reduce(or_, (facts.mode for facts in groups)))
        sizes, captured, padded = self._sizes(needed, shape.num_draft_tokens, mode)

        def may_use(tier: int, best: int) -> bool:
            assert postponed is not None
            if tier == 0 and self.draft_rests:
                if last.rests:
                    return True  # this step has no tree anyway: a draft that rests wakes in a step of its own
                if best:
                    return False  # a draft does not rest for want of a program: waking it costs a step
            _, awake_mode = self._extend_mode(tier, groups, sizes, NO_LAST_TREE)
            return postponed.may_use(ProgramKey(tier, 0, int(mode), sizes, awake_mode))

        # What `may_use` depends on besides its arguments and `last`: a choice is kept while all this is equal.
        programs = tuple[object, ...]()
        if waits := captured and postponed is not None:
            programs = mode, sizes, groups[0].captured, postponed.capture_us, postponed.lost_us(int(mode), sizes)
        choice = self._choose(groups, mode, last, times, programs, may_use if waits else None)
        tier, extend_mode = self._extend_mode(choice.tier, groups, sizes, last)
        return StepPlan(
            step=facts_by_rank[0].step,
            decodes=tuple(facts.decodes for facts in groups),
            prompt_rows=tuple(facts.prompt_rows for facts in groups),
            finishing_prompts=tuple(facts.finishing_prompts for facts in groups),
            step_input_len=tuple(facts.step_input_len for facts in groups),
            sizes=sizes,
            captured=captured,
            tier=tier,
            extend_mode=extend_mode,
            context=max(facts.context for facts in groups),
            lost_us=0 if extend_mode is ExtendMode.MISSED else choice.lost_us,
            no_requests=not any(facts.requests for facts in facts_by_rank),
            leaving=any(facts.leaving for facts in facts_by_rank),
            decode_us=tuple(facts.decode_us for facts in groups),
            mode=mode,
            scored=tuple(facts.scored for facts in groups),
            forced_nodes=self._forced(sizes, shape.max_forced_nodes) if SamplingMode.CONSTRAINED in mode else 0,
            # Counts are read from the device, so steps whose sizes must be known before (captured or padded) cannot
            # use them. With one group every rank has all rows anyway.
            routes_to_experts=self.expert_parallel and not captured and not padded and len(groups) > 1,
        )

    def _choose(
        self,
        groups: Sequence[RankFacts],
        mode: SamplingMode,
        last: LastTree,
        times: TreeTimes | None,
        programs: tuple[object, ...],
        may_use: Callable[[int, int], bool] | None,
    ) -> ChosenTier:
        """Return the tier of the step, one for all groups: the collectives of their drafts must match.

        If a request of any group has a grammar, the step uses the largest allowed tree without looked-up tokens: only
        such trees get nodes for the tokens that a grammar forces. These nodes need no forward of the draft.

        `programs` is all that `may_use` depends on besides its arguments and `last`. `times` keeps the choice for later
        steps.
        """
        max_tier, decodes = min(facts.max_tier for facts in groups), max(facts.decodes for facts in groups)
        if SamplingMode.CONSTRAINED in mode:
            return ChosenTier(max_tier if self.last_drafted_tier is None else min(max_tier, self.last_drafted_tier))
        if times is None or not decodes:
            return ChosenTier(max_tier)
        if (explored_tier := max(facts.explores for facts in groups)) != NO_TIER:
            return ChosenTier(min(explored_tier, max_tier))
        prompt_us, context = max(facts.prompt_us for facts in groups), max(facts.context for facts in groups)
        outlooks = tuple(facts.outlook for facts in groups)
        key = decodes, rounded(context), max_tier, prompt_us, outlooks, last, programs
        if (choice := times.choices.get(key)) is not None:
            return choice
        choice = choose_tier(times.of(decodes, context)[: max_tier + 1], outlooks, last, prompt_us, may_use)
        if not choice.lost_us:  # no better tree waits for its program
            times.keep(key, choice)
        return choice

    def _extend_mode(
        self, tier: int, groups: Sequence[RankFacts], sizes: tuple[Sizes, ...], last: LastTree
    ) -> tuple[int, ExtendMode]:
        """Return the tier of the step, and which rows its draft reads. The tier is `tier`, except where the draft has
        rested (has not read the tokens of decoding requests) and `tier` has trees: the step then has no trees (tier 0),
        and its draft reads the tokens that it has missed.
        """
        if not self.draft_rests or not any(facts.decodes for facts in groups):
            return tier, ExtendMode.ACCEPTED
        if tier:
            return (0, ExtendMode.MISSED) if last.rests else (tier, ExtendMode.ACCEPTED)
        has_prompts = any(sizes_of_group.prompt_rows for sizes_of_group in sizes)
        return 0, ExtendMode.PROMPTS if has_prompts else ExtendMode.NOTHING

    def _forced(self, sizes: tuple[Sizes, ...], max_forced: int) -> int:
        """Return the number of forced nodes of a tree, which all trees of a step have, even without a grammar."""
        return min(max_forced, self.max_forced_rows // max(1, *(sizes_of_group.decodes for sizes_of_group in sizes)))

    def _sizes(
        self, needed: tuple[Sizes, ...], tree_nodes: int, mode: SamplingMode
    ) -> tuple[tuple[Sizes, ...], bool, bool]:
        """Return the sizes that each group runs, whether the step may be captured, and whether it is padded.

        - Padded: every group runs as many rows as the largest group. All groups then exchange equally many rows, and
          one program fits many loads. Otherwise the groups run different numbers of rows, and exchange exactly these.
          Whether a step is padded depends on `padding`, not on capture.
        - Captured: the sizes are those of a program. A step is not captured if `buckets` is None, if its mode is not
          capturable, or if no program can have the sizes of one of the groups. If `Buckets.equal_sizes` is set, a step
          of several groups is captured only if it is padded.
        """
        max_needed, rows = max_sizes(needed), [group.rows(tree_nodes) for group in needed]
        padded, all_rows = self.padding == "padded", len(needed) * max_needed.rows(tree_nodes)
        if self.padding == "auto":  # idle rows / all rows <= max_idle_share
            padded = all_rows - sum(rows) <= self.max_idle_share * all_rows
        same_sizes = padded or len(needed) == 1  # all groups surely run the same sizes (see `Buckets.equal_sizes`)
        if self.buckets is not None and mode.capturable and (same_sizes or not self.buckets.equal_sizes):
            fit_group = self.buckets.fit
            fitted = [fit_group(needed)] * len(needed) if padded else [fit_group((group,)) for group in needed]
            fitting = tuple(group for group in fitted if group is not None and self.buckets.can_hold(group, tree_nodes))
            if len(fitting) == len(needed):  # if one group does not fit, the step runs eagerly on all ranks
                return fitting, True, padded
        if padded:
            return (
                tuple(max_needed._replace(finishing_prompts=group.finishing_prompts) for group in needed),
                False,
                True,
            )
        return needed, False, False


class ScriptCall(NamedTuple):
    """A call that a step makes: the exchange method `op`, in `phase`, with `rows[g]` rows of attention group g.

    A row has `width` numbers, and `head` turns it into `columns` logits on each rank. If the head is sharded over the
    world, each rank computes logits for the rows of all groups. For `share`, `rows` are numbers of integers. For
    `counts`, `width` is the number of parts of the experts and `columns` the number of experts that each row takes.
    """

    phase: str
    op: str
    rows: tuple[int, ...]
    width: int = 0
    columns: int = 0


class ExpertParallel(NamedTuple):
    """Expert-parallel experts: they are divided into `ep_size` parts, and every row takes `experts_per_row` experts."""

    ep_size: int
    experts_per_row: int

    def calls(self, phase: str, rows: tuple[int, ...], width: int, routes_to_experts: bool) -> list[ScriptCall]:
        """Return the calls that bring rows to the experts and back.

        Without `routes_to_experts`, `gather` sends every row to every part; no exchange of counts is needed. With
        `routes_to_experts`, a row goes once to each part that holds at least one of its experts, with the weights and
        ids of all its experts.
        """
        if not routes_to_experts:
            return [ScriptCall(phase, "gather", rows, width), ScriptCall(phase, "scatter", rows, width)]
        counts = ScriptCall(phase, "counts", rows, self.ep_size, self.experts_per_row)
        return [
            counts,  # width + 2 k columns: a row travels with the weights and ids of its k experts
            ScriptCall(phase, "dispatch", rows, width + 2 * self.experts_per_row),
            ScriptCall(phase, "combine", rows, width),
        ]


class Ops(NamedTuple):
    """The exchange methods that one forward of a model calls (`forward`) and that its head calls (`head`), in order.

    `width` is the model's hidden size, `embed_width` the width of its embedding if that is another one (otherwise 0),
    `columns` the number of logits per row of a rank's shard of the head. A multi-layer draft has `runners` models. At
    level l of a tree, model l runs the rows of levels 1 to l. In the extend phase all models run. `sharded` lists the
    calls that follow a sharded head; it is None if the head is not sharded. `expert_parallel` lists the calls that
    replace the placeholder `EXPERT_CALLS`; it is None if the model is not expert-parallel.
    """

    forward: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    width: int = 0
    columns: int = 0
    sharded: ShardedHead | None = None
    runners: int = 1
    expert_parallel: ExpertParallel | None = None
    embed_width: int = 0


def script(
    plan: StepPlan, shape: TreeShape, target: Ops, draft: Ops | None, has_followers: bool = False
) -> list[ScriptCall]:
    """Return all calls of the exchange in a step of this plan, in order. `draft` is None if no draft model runs. If
    `has_followers`, groups have more than one rank, and each leader first shares its step input with the others.

    `Exchange` compares each call with this script, and raises before a wrong call can reach the other ranks.
    """
    if plan.empty or plan.leaving:
        return []
    decodes, prompt_rows, finishing_prompts = zip(*plan.sizes, strict=True)
    level_rows = tuple(n * shape.topk for n in decodes)
    calls = [ScriptCall("order", "share", plan.step_input_len)] if has_followers else []

    def forward(phase: str, ops: Ops, rows: tuple[int, ...]) -> None:
        for op in ops.forward:
            if op == EXPERT_CALLS and ops.expert_parallel is not None:
                calls.extend(ops.expert_parallel.calls(phase, rows, ops.width, plan.routes_to_experts))
            else:
                width = ops.embed_width if op == "embed" and ops.embed_width else ops.width
                calls.append(ScriptCall(phase, op, rows, width))

    # Score `rows` and choose tokens. With a sharded head, each shard sends `payload` numbers per row for the choice.
    def score(phase: str, ops: Ops, rows: tuple[int, ...], payload: int) -> None:
        calls.extend(ScriptCall(phase, op, rows, ops.width, ops.columns) for op in ops.head)
        if ops.sharded is not None:
            calls.extend(
                ScriptCall(phase, op, rows, width) for op, width in ops.sharded.sampling_calls(plan.mode, payload)
            )

    if draft is not None:
        num_sent = numbers_sent_per_row(shape.topk, draft.columns)
        # Level 0 needs no forward, as the extend phase of the step before made its proposals. S - 1 levels do.
        for level in range(1, shape.drafted_shape.num_steps):
            forward("draft", draft, level_rows if draft.runners == 1 else tuple(n * level for n in level_rows))
            score("draft", draft, level_rows, num_sent)
    # Target: R N tree rows and c prompt rows; its head scores the tree rows and the F last rows of prompts.
    tree_rows = tuple(n * shape.num_draft_tokens for n in decodes)
    forward("target", target, tuple(t + c for t, c in zip(tree_rows, prompt_rows, strict=True)))
    score("target", target, tuple(t + f for t, f in zip(tree_rows, finishing_prompts, strict=True)), NUMBERS_PER_CHOICE)
    # Extend: S + 1 rows per request and c prompt rows; its head scores one row per request and per finishing prompt.
    # The exceptions are in `ExtendMode`.
    width = shape.num_steps + 1
    if draft is not None and plan.extend_mode is not ExtendMode.NOTHING:
        rows_per_request = {ExtendMode.PROMPTS: 0, ExtendMode.MISSED: MISSED_TOKENS}.get(plan.extend_mode, width)
        for _ in range(draft.runners):
            forward("extend", draft, tuple(n * rows_per_request + c for n, c in zip(decodes, prompt_rows, strict=True)))
        read = [0 if plan.extend_mode.rests else n for n in decodes]
        score("extend", draft, tuple(n + f for n, f in zip(read, finishing_prompts, strict=True)), num_sent)
    # Log-probabilities: of the S + 1 rows of each accepted path and of the first tokens after prompts.
    if target.sharded is not None and SamplingMode.LOGPROBS in plan.mode:
        rows = tuple(n * width + f for n, f in zip(decodes, finishing_prompts, strict=True))
        calls.extend(
            ScriptCall("extend", op, rows, numbers) for op, numbers in target.sharded.logprob_calls(TOP_LOGPROBS)
        )
    if SamplingMode.PROMPT_LOGPROBS in plan.mode:  # the head runs once more, on the scored prompt rows
        calls.extend(ScriptCall("extend", op, plan.scored, target.width, target.columns) for op in target.head)
        if target.sharded is not None:
            payload = [*target.sharded.logprob_calls(TOP_LOGPROBS), *target.sharded.rank_calls()]
            calls.extend(ScriptCall("extend", op, plan.scored, numbers) for op, numbers in payload)
    return calls
