"""One gathered table of facts -> one plan, the same on every rank because the function is pure (law 2, lockstep).

Legend: G attention groups (data-parallel ranks); R decoding requests, c prompt rows, F finishing prompts of a group.
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
    """One rank's row: a header that must be the same on all ranks, then what its group brings to the step.

    Header: `epoch` counts lives of the gang, `step` its steps, `digest` is the last plan's, `calls` counts the
    collectives that the rank has been through, `rule` is a checksum of what else determines plans and scripts,
    `captured` one of the programs that the rank can replay; within a group `order` and `results` must be the same too,
    checksums of the last order and the last results read.
    Sizes: `decodes` requests decode, `prompt_rows` prompt rows are in the step, `scored` of which are asked for
    log-probabilities, `finals` prompts finish, `order_words` is the length of the order for the group's followers,
    `mode` that order's, `num_steps` the deepest tree that the rank votes for,
    `requests` counts its waiting and running ones, `leaving` asks to end the gang, `decode_us` is the predicted time of
    the group's decoding alone.
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
    """What decides every shape and every choice of a step's program, and in which `turn`'s memory it works, where steps
    that may be under way at the same time have memory of their own.
    """

    num_steps: int
    forced: int
    mode: int
    sizes: tuple[Sizes, ...]
    turn: int = 0


class StepPlan(NamedTuple):
    """What every rank runs in one step; entry g of each tuple belongs to attention group g.

    `decodes`, `prompt_rows` and `finals` are what requests need, `sizes` what is run; `scored` are the prompt rows that
    are asked for log-probabilities. `captured`: the step runs as a program of its `key`, which is captured or about to
    be. `num_steps` is the tier, the minimum of the votes, `forced` how many nodes of each tree are left to grammars,
    `mode` whatever some group needs. `quiet`: nobody has requests; `leaving`: the gang ends with this step. `counted`:
    where experts are apart, rows go only to those that they take, after the ranks have told how many; else to all.
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
        """Whether no group has a row: nothing is run, whoever has requests waits for results of steps under way."""
        return not (any(self.decodes) or any(self.prompt_rows))

    @property
    def digest(self) -> int:
        """A checksum that the next step's header carries."""
        return zlib.crc32(repr(tuple(self)).encode())

    def tree(self, shapes: Sequence[TreeShape]) -> TreeShape:
        """The trees of the step, of those by tier; with a grammar somewhere they have room for what it forces."""
        return shapes[self.num_steps].forcing(self.forced)

    @property
    def key(self) -> ProgramKey:
        """That of the step's program."""
        return ProgramKey(self.num_steps, self.forced, int(self.mode), self.sizes)

    def idle(self, group: int) -> Sizes:
        """What fills the plan of a group: idle requests, idle prompt rows, and ends of prompts that there are not."""
        run = self.sizes[group]
        return Sizes(
            run.decodes - self.decodes[group],
            run.prompt_rows - self.prompt_rows[group],
            run.finals - self.finals[group],
        )


@dataclass(frozen=True, slots=True)
class PlanRule:
    """What determines the plan besides the facts; the same on every rank.

    `waste` is the largest share of idle rows that padding may add under `auto`: on a GPU equal parts and one program
    for all are worth up to half; a CPU gains nothing from them. `buckets` are the sizes of captured programs, None
    where nothing is captured. Of each group's rows, `forced_rows` at most are for what grammars force: a GPU hardly
    notices some rows more, a CPU pays for each. `apart`: experts are, so a step may send them rows by counts.
    """

    attn_tp: int
    padding: Padding
    waste: float
    buckets: Buckets | None = None
    forced_rows: int = 0
    apart: bool = False

    def plan(self, table: Sequence[RankFacts], shape: TreeShape) -> StepPlan:
        """The plan that follows from the facts of all ranks; a group's facts are its leader's."""
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
            num_steps=min(f.num_steps for f in groups),
            quiet=not any(f.requests for f in table),
            leaving=any(f.leaving for f in table),
            decode_us=tuple(f.decode_us for f in groups),
            mode=mode,
            scored=tuple(f.scored for f in groups),
            forced=self._forced(sizes, shape.room) if SamplingMode.CONSTRAINED in mode else 0,
            counted=self.apart and not captured and not padded and len(groups) > 1,
        )

    def _forced(self, sizes: tuple[Sizes, ...], room: int) -> int:
        """The nodes of each tree that are left to grammars: the same in all trees of a step, whoever has a grammar."""
        return min(room, self.forced_rows // max(1, *(own.decodes for own in sizes)))

    def _sizes(self, real: tuple[Sizes, ...], nodes: int, mode: SamplingMode) -> tuple[tuple[Sizes, ...], bool, bool]:
        """What each group runs, whether as a captured program (not if some group is too large for one, or the mode is
        not repeatable), and whether all run the same.

        When padded, every group runs the rows of the largest one (equal parts in the exchange, and one program for
        many loads); otherwise each runs its own and the exchange sends exact counts.
        """
        largest, rows = most(real), [own.rows(nodes) for own in real]
        padded, all_rows = self.padding == "padded", len(real) * largest.rows(nodes)
        if self.padding == "auto":
            padded = all_rows - sum(rows) <= self.waste * all_rows
        alike = padded or len(real) == 1
        if self.buckets is not None and mode.repeatable and (alike or not self.buckets.alike):
            fit = self.buckets.fitted
            fitted = [fit(real)] * len(real) if padded else [fit((own,)) for own in real]
            within = tuple(own for own in fitted if own is not None and self.buckets.hold(own, nodes))
            if len(within) == len(real):
                return within, True, padded
        if padded:
            return tuple(largest._replace(finals=own.finals) for own in real), False, True
        return real, False, False


class ScriptCall(NamedTuple):
    """One entry of a step's script: the exchange method that comes next, and the rows of each group that enter it.

    Rows are `width` wide; those of a head become `columns` logits on each rank. Where the head is sharded over the
    world, every rank goes on with the rows of all groups. `counts` brings `width` numbers, of rows that each take
    `columns` experts.
    """

    phase: str
    op: str
    rows: tuple[int, ...]
    width: int = 0
    columns: int = 0


class ExpertParallel(NamedTuple):
    """Experts of which each rank holds one of so many `parts`; every row takes `active` of them."""

    parts: int
    active: int

    def calls(self, phase: str, rows: tuple[int, ...], width: int, counted: bool) -> list[ScriptCall]:
        """Those that bring rows to experts and back.

        A row goes to a part once, however many of its experts are there, with weights and ids of all that it takes. So
        the most that can be is that it goes to every part once, as by `gather`: a form whose sizes nobody has to tell.
        """
        if not counted:
            return [ScriptCall(phase, "gather", rows, width), ScriptCall(phase, "scatter", rows, width)]
        counts = ScriptCall(phase, "counts", rows, self.parts, self.active)
        return [
            counts,
            ScriptCall(phase, "dispatch", rows, width + 2 * self.active),
            ScriptCall(phase, "combine", rows, width),
        ]


class Ops(NamedTuple):
    """The exchange methods that one forward of a model calls, in order, and those that its head calls.

    `width` is the model's hidden size, `columns` the logits that a rank's shard of the head gives per row. A draft
    of several layers has `runners` models: at level l runner l runs the rows of levels 1 to l; at extend all run.
    `sharded` says what follows a head of which each rank has a shard, `apart` what stands in the place of `EXPERTS`.
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
    """Every call of the exchange in a step of this plan, in order; `draft` is None in plain decoding. `followed`:
    groups have followers, with whom the leaders first share their orders.

    A rank that is about to make another call is out of step; `Exchange` raises before that can reach its peers.
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

    def choice(phase: str, ops: Ops, rows: tuple[int, ...], told: int) -> None:
        calls.extend(ScriptCall(phase, op, rows, ops.width, ops.columns) for op in ops.head)
        if ops.sharded is not None:
            calls.extend(ScriptCall(phase, op, rows, width) for op, width in ops.sharded.choosing(plan.mode, told))

    if draft is not None:
        best = proposed(shape.topk, draft.columns)
        for level in range(1, shape.drafted.num_steps):
            forward("draft", draft, levels if draft.runners == 1 else tuple(n * level for n in levels))
            choice("draft", draft, levels, best)
    tree_rows = tuple(n * shape.num_draft_tokens for n in r)
    forward("target", target, tuple(a + b for a, b in zip(tree_rows, c, strict=True)))
    choice("target", target, tuple(a + f for a, f in zip(tree_rows, finals, strict=True)), CHOSEN)
    width = shape.num_steps + 1
    if draft is not None:
        for _ in range(draft.runners):
            forward("extend", draft, tuple(n * width + b for n, b in zip(r, c, strict=True)))
        choice("extend", draft, tuple(n + f for n, f in zip(r, finals, strict=True)), best)
    if target.sharded is not None and SamplingMode.LOGPROBS in plan.mode:
        rows = tuple(n * width + f for n, f in zip(r, finals, strict=True))
        calls.extend(ScriptCall("extend", op, rows, numbers) for op, numbers in target.sharded.asking(TOP_LOGPROBS))
    if SamplingMode.PROMPT_LOGPROBS in plan.mode:
        calls.extend(ScriptCall("extend", op, plan.scored, target.width, target.columns) for op in target.head)
        if target.sharded is not None:
            told = [*target.sharded.asking(TOP_LOGPROBS), *target.sharded.ranking()]
            calls.extend(ScriptCall("extend", op, plan.scored, numbers) for op, numbers in told)
    return calls
