"""The plan of a step: a pure function of the gathered facts, so it is the same on every rank (law 2, lockstep).

Legend: G attention groups (data-parallel ranks); per group R decoding requests, c prompt rows, F finishing prompts.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Literal, NamedTuple

from cluster.batch import SamplingMode
from cluster.config.tree_shape import TreeShape
from cluster.dp_attention.sizes import Buckets, Sizes, most
from cluster.models.exchange import EXPERTS
from cluster.sampling.sampler import TOP_LOGPROBS
from cluster.sampling.sharded import CHOSEN, ShardedHead, proposed

Padding = Literal["auto", "padded", "exact"]


class RankFacts(NamedTuple):
    """One rank's row of the gathered table. The order of the fields does not show that they are of three kinds:

    - Equal on all ranks (`HEADER`): `epoch` counts the starts of the gang, `step` its steps. `digest` is that of the
      last plan. `calls` counts the collectives of the rank so far. `rule` is a checksum of everything else that
      determines plans and scripts, `captured` a checksum of the keys of captured programs.
    - Equal within a group (`GROUP_HEADER`): `order` and `results`, checksums of the last step input and of the last
      results that were read.
    - The rank's own. `decodes`, `prompt_rows`, `finals` (prompts that finish) and `scored` (prompt rows that return
      log-probabilities) are numbers. `order_words` is the packed length of the step input, `mode` its mode. `num_steps`
      is a vote for the tree depth. `requests` counts waiting and running requests. `decode_us` is that of `Schedule`: a
      predicted time, or without a pace the number of decoding requests. A nonzero `leaving` asks to end the gang. Only
      `requests` and `leaving` of followers are used.
    """

    epoch: int
    step: int
    digest: int
    calls: int
    decodes: int = 0
    prompt_rows: int = 0
    finals: int = 0
    order_words: int = 0
    num_steps: int = 0
    requests: int = 0
    leaving: int = 0
    rule: int = 0
    order: int = 0
    results: int = 0
    decode_us: int = 0
    mode: int = 0
    captured: int = 0
    scored: int = 0


HEADER = ("epoch", "step", "digest", "calls", "rule", "captured")
GROUP_HEADER = ("order", "results")


class ProgramKey(NamedTuple):
    """Everything that decides the shapes and branches of a step's program. `turn` is the index of its buffer set: two
    steps that may be in flight together have different sets.
    """

    num_steps: int
    forced: int
    mode: int
    sizes: tuple[Sizes, ...]
    turn: int = 0


class StepPlan(NamedTuple):
    """The work of all ranks in one step. Entry g of each tuple belongs to attention group g.

    `decodes`, `prompt_rows` and `finals` are the rows that requests need; `sizes` are the rows that run, with padding.
    `scored` counts the prompt rows that return log-probabilities. `captured` says whether the step may be captured, or
    replayed, as the program of its `key`. `num_steps` is the tier, the minimum of the votes. `forced` nodes of each
    tree are reserved for grammars. `mode` is the union of all groups' modes. `quiet` says that no rank has requests,
    `leaving` that the gang ends with this step. `counted` is for expert-parallel experts. If it is True, the ranks
    first exchange counts, then send each row only to the parts that hold its experts. Otherwise every row goes to every
    part.
    """

    step: int
    decodes: tuple[int, ...]
    prompt_rows: tuple[int, ...]
    finals: tuple[int, ...]
    order_words: tuple[int, ...]
    sizes: tuple[Sizes, ...]
    captured: bool
    num_steps: int
    quiet: bool
    leaving: bool
    decode_us: tuple[int, ...]
    mode: SamplingMode = SamplingMode(0)
    scored: tuple[int, ...] = ()
    forced: int = 0
    counted: bool = False

    @property
    def empty(self) -> bool:
        """Whether no group has a row. Nothing runs then; ranks with requests wait for results of steps in flight."""
        return not (any(self.decodes) or any(self.prompt_rows))

    @property
    def digest(self) -> int:
        """A checksum that the next step's header carries."""
        return zlib.crc32(repr(tuple(self)).encode())

    def tree(self, shapes: Sequence[TreeShape]) -> TreeShape:
        """The tree of the step, from the `shapes` by tier, with room for forced nodes if any request has a grammar."""
        return shapes[self.num_steps].forcing(self.forced)

    @property
    def key(self) -> ProgramKey:
        """The key of the step's program, with turn 0 in place of its own."""
        return ProgramKey(self.num_steps, self.forced, int(self.mode), self.sizes)

    def idle(self, group: int) -> Sizes:
        """The padding of a group: its idle requests, idle prompt rows and idle ends of prompts."""
        run = self.sizes[group]
        return Sizes(
            run.decodes - self.decodes[group],
            run.prompt_rows - self.prompt_rows[group],
            run.finals - self.finals[group],
        )


@dataclass(frozen=True, slots=True)
class PlanRule:
    """The settings that determine the plan besides the facts; the same on every rank.

    `waste` is for padding `auto`: a step is padded if at most this share of its rows would be idle. On a GPU, equal
    parts and one program for all groups are worth up to half of the rows; on a CPU, none. `buckets` are the sizes of
    captured programs, None if nothing is captured. `forced_rows` is the largest number of rows of a group for forced
    nodes: more rows cost a GPU little, a CPU much. `apart` says that experts are expert-parallel, so that
    `StepPlan.counted` may be True.
    """

    attn_tp: int
    padding: Padding
    waste: float
    buckets: Buckets | None = None
    forced_rows: int = 0
    apart: bool = False

    def plan(self, table: Sequence[RankFacts], shape: TreeShape) -> StepPlan:
        """Return the plan that follows from the facts of all ranks. The facts of a group are those of its leader."""
        groups = table[:: self.attn_tp]
        real = tuple(Sizes(f.decodes, f.prompt_rows, f.finals) for f in groups)
        mode = SamplingMode(reduce(or_, (f.mode for f in groups)))
        sizes, captured, padded = self._sizes(real, shape.num_draft_tokens, mode)
        return StepPlan(
            step=table[0].step,
            decodes=tuple(f.decodes for f in groups),
            prompt_rows=tuple(f.prompt_rows for f in groups),
            finals=tuple(f.finals for f in groups),
            order_words=tuple(f.order_words for f in groups),
            sizes=sizes,
            captured=captured,
            num_steps=min(f.num_steps for f in groups),  # one depth for all: the draft's collectives must match
            quiet=not any(f.requests for f in table),
            leaving=any(f.leaving for f in table),
            decode_us=tuple(f.decode_us for f in groups),
            mode=mode,
            scored=tuple(f.scored for f in groups),
            forced=self._forced(sizes, shape.room) if SamplingMode.CONSTRAINED in mode else 0,
            # Counts are read from the device, so steps whose sizes must be known before (captured or padded) cannot
            # use them. With one group every rank has all rows anyway.
            counted=self.apart and not captured and not padded and len(groups) > 1,
        )

    def _forced(self, sizes: tuple[Sizes, ...], room: int) -> int:
        """The forced nodes of each tree: equal for all trees of a step, whether their requests have grammars or not."""
        return min(room, self.forced_rows // max(1, *(own.decodes for own in sizes)))

    def _sizes(self, real: tuple[Sizes, ...], nodes: int, mode: SamplingMode) -> tuple[tuple[Sizes, ...], bool, bool]:
        """Return the sizes that each group runs, whether the step may be captured, and whether it is padded.

        - Padded, by the setting `padding` and with or without capture: every group runs the rows of the largest group.
          Parts of the exchange are then equal, and one program fits many loads. Otherwise each group runs its own rows,
          and the exchange sends exact counts.
        - Captured: the sizes are those of a program. A step is not captured if there are no programs, if its mode is
          not repeatable, if one group is too large, or if `Buckets.alike` asks for equal sizes and the groups are not
          `alike`.
        """
        largest, rows = most(real), [own.rows(nodes) for own in real]
        padded, all_rows = self.padding == "padded", len(real) * largest.rows(nodes)
        if self.padding == "auto":  # idle rows / all rows <= waste
            padded = all_rows - sum(rows) <= self.waste * all_rows
        alike = padded or len(real) == 1  # whether all groups run the same sizes; `Buckets.alike` requires it
        if self.buckets is not None and mode.repeatable and (alike or not self.buckets.alike):
            fit = self.buckets.fitted
            fitted = [fit(real)] * len(real) if padded else [fit((own,)) for own in real]
            within = tuple(own for own in fitted if own is not None and self.buckets.hold(own, nodes))
            if len(within) == len(real):  # if one group does not fit, the step runs eagerly on all ranks
                return within, True, padded
        if padded:
            return tuple(largest._replace(finals=own.finals) for own in real), False, True
        return real, False, False


class ScriptCall(NamedTuple):
    """One entry of a step's script: an exchange method, and the number of rows of each group that enter it.

    Rows are `width` wide; `head` turns them into `columns` logits on each rank. If the head is sharded over the world,
    each rank computes logits for the rows of all groups. For `counts`, `width` is the number of parts of the experts
    and `columns` the number of experts that each row takes.
    """

    phase: str
    op: str
    rows: tuple[int, ...]
    width: int = 0
    columns: int = 0


class ExpertParallel(NamedTuple):
    """Expert-parallel experts: each rank holds one of `parts` parts, and every row takes `active` experts."""

    parts: int
    active: int

    def calls(self, phase: str, rows: tuple[int, ...], width: int, counted: bool) -> list[ScriptCall]:
        """Return the calls that bring rows to the experts and back.

        Without `counted`, every row goes to every part, which is what `gather` does; no exchange of counts is needed.
        With `counted`, a row goes once to each part that holds at least one of its experts, with the weights and ids of
        all its experts.
        """
        if not counted:
            return [ScriptCall(phase, "gather", rows, width), ScriptCall(phase, "scatter", rows, width)]
        counts = ScriptCall(phase, "counts", rows, self.parts, self.active)
        return [
            counts,  # width + 2 k columns: a row travels with the weights and ids of its k experts
            ScriptCall(phase, "dispatch", rows, width + 2 * self.active),
            ScriptCall(phase, "combine", rows, width),
        ]


class Ops(NamedTuple):
    """The exchange methods that one forward of a model calls (`forward`) and that its head calls (`head`), in order.

    `width` is the model's hidden size, `columns` the number of logits per row of a rank's shard of the head. A
    multi-layer draft has `runners` models: at level l runner l runs the rows of levels 1 to l; at extend all of them
    run. `sharded` gives the calls after a sharded head, `apart` the calls that replace the placeholder `EXPERTS`.
    """

    forward: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    width: int = 0
    columns: int = 0
    sharded: ShardedHead | None = None
    runners: int = 1
    apart: ExpertParallel | None = None


def script(
    plan: StepPlan, shape: TreeShape, target: Ops, draft: Ops | None, followed: bool = False
) -> list[ScriptCall]:
    """Return all calls of the exchange in a step of this plan, in order. `draft` is None in plain decoding. If
    `followed`, groups have followers, and each leader first shares its step input.

    `Exchange` compares each call with this script and raises before a wrong call can reach the peers.
    """
    if plan.empty or plan.leaving:
        return []
    r, c, finals = zip(*plan.sizes, strict=True)
    levels = tuple(n * shape.topk for n in r)
    calls = [ScriptCall("order", "share", plan.order_words)] if followed else []

    def forward(phase: str, ops: Ops, rows: tuple[int, ...]) -> None:
        for op in ops.forward:
            if op == EXPERTS and ops.apart is not None:
                calls.extend(ops.apart.calls(phase, rows, ops.width, plan.counted))
            else:
                calls.append(ScriptCall(phase, op, rows, ops.width))

    # Score `rows` and choose tokens; with a sharded head, each shard sends `told` numbers per row.
    def choice(phase: str, ops: Ops, rows: tuple[int, ...], told: int) -> None:
        calls.extend(ScriptCall(phase, op, rows, ops.width, ops.columns) for op in ops.head)
        if ops.sharded is not None:
            calls.extend(ScriptCall(phase, op, rows, width) for op, width in ops.sharded.choosing(plan.mode, told))

    if draft is not None:
        best = proposed(shape.topk, draft.columns)
        # Level 0 needs no forward: its proposals are carried over from the last extend. So S - 1 forwards.
        for level in range(1, shape.drafted.num_steps):
            forward("draft", draft, levels if draft.runners == 1 else tuple(n * level for n in levels))
            choice("draft", draft, levels, best)
    # Target: R N tree rows and c prompt rows; its head scores the tree rows and the F last rows of prompts.
    tree_rows = tuple(n * shape.num_draft_tokens for n in r)
    forward("target", target, tuple(a + b for a, b in zip(tree_rows, c, strict=True)))
    choice("target", target, tuple(a + f for a, f in zip(tree_rows, finals, strict=True)), CHOSEN)
    # Extend: S + 1 rows per request and c prompt rows; its head scores one row per request and prompt.
    width = shape.num_steps + 1
    if draft is not None:
        for _ in range(draft.runners):
            forward("extend", draft, tuple(n * width + b for n, b in zip(r, c, strict=True)))
        choice("extend", draft, tuple(n + f for n, f in zip(r, finals, strict=True)), best)
    # Log-probabilities: of the S + 1 rows of each accepted path and of the first tokens after prompts.
    if target.sharded is not None and SamplingMode.LOGPROBS in plan.mode:
        rows = tuple(n * width + f for n, f in zip(r, finals, strict=True))
        calls.extend(ScriptCall("extend", op, rows, numbers) for op, numbers in target.sharded.asking(TOP_LOGPROBS))
    if SamplingMode.PROMPT_LOGPROBS in plan.mode:  # the head runs once more, on the scored prompt rows
        calls.extend(ScriptCall("extend", op, plan.scored, target.width, target.columns) for op in target.head)
        if target.sharded is not None:
            told = [*target.sharded.asking(TOP_LOGPROBS), *target.sharded.ranking()]
            calls.extend(ScriptCall("extend", op, plan.scored, numbers) for op, numbers in told)
    return calls
