"""One gathered table of facts -> one plan, the same on every rank because the function is pure (law 2, lockstep).

Legend: G attention groups (data-parallel ranks); R decoding requests, c prompt rows, F finishing prompts of a group.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Literal, NamedTuple

from cluster.batch import Mode
from cluster.config import TreeShape
from cluster.forward.choose import TOP_LOGPROBS
from cluster.forward.sharded import CHOSEN, ShardedHead, proposed

Padding = Literal["auto", "padded", "exact"]


class Facts(NamedTuple):
    """One rank's row: a header that must be the same on all ranks, then what its group brings to the step.

    Header: `epoch` counts lives of the gang, `step` its steps, `digest` is the last plan's, `calls` counts the
    collectives that the rank has been through, `rule` is a checksum of what else determines plans and scripts; within a
    group `order` and `results` must be the same too, checksums of the last order and the last results read.
    Sizes: `decodes` requests decode, `prompt_rows` prompt rows are in the step, `finals` prompts finish, `order_words`
    is the length of the order for the group's followers, `mode` that order's, `num_steps` the deepest tree that the
    rank votes for,
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


HEADER = ("epoch", "step", "digest", "calls", "rule")
GROUP_HEADER = ("order", "results")


class StepPlan(NamedTuple):
    """What every rank runs in one step; entry g of each tuple belongs to attention group g.

    When `padded`, every group runs the rows of the largest one (equal parts in the exchange, and one shape per graph
    bucket); otherwise each runs its own and the exchange sends exact counts. `num_steps` is the tier, the minimum of
    the votes, `mode` whatever some group needs. `quiet`: nobody has requests; `leaving`: the gang ends with this step.
    """

    step: int
    decodes: tuple[int, ...]
    prompt_rows: tuple[int, ...]
    finals: tuple[int, ...]
    order_words: tuple[int, ...]
    padded: bool
    num_steps: int
    quiet: bool
    leaving: bool
    decode_us: tuple[int, ...]
    mode: Mode = Mode(0)

    @property
    def empty(self) -> bool:
        """Whether no group has a row: nothing is run, whoever has requests waits for results of steps under way."""
        return not (any(self.decodes) or any(self.prompt_rows))

    @property
    def digest(self) -> int:
        """A checksum that the next step's header carries."""
        return zlib.crc32(repr(tuple(self)).encode())

    @property
    def planned_decodes(self) -> tuple[int, ...]:
        """R of each group, idle rows included."""
        return (max(self.decodes),) * len(self.decodes) if self.padded else self.decodes

    @property
    def planned_prompt_rows(self) -> tuple[int, ...]:
        """c of each group, idle rows included."""
        return (max(self.prompt_rows),) * len(self.prompt_rows) if self.padded else self.prompt_rows

    def idle(self, group: int) -> tuple[int, int]:
        """How many idle requests and idle prompt rows fill the plan of a group."""
        requests = self.planned_decodes[group] - self.decodes[group]
        return requests, self.planned_prompt_rows[group] - self.prompt_rows[group]


@dataclass(frozen=True, slots=True)
class PlanRule:
    """What determines the plan besides the facts; the same on every rank.

    `waste` is the largest share of idle rows that padding may add under `auto`: on a GPU equal parts and one graph
    bucket are worth up to half; a CPU gains nothing from them.
    """

    attn_tp: int
    padding: Padding
    waste: float

    def plan(self, table: Sequence[Facts], shape: TreeShape) -> StepPlan:
        """The plan that follows from the facts of all ranks; a group's facts are its leader's."""
        groups = table[:: self.attn_tp]
        nodes = shape.num_draft_tokens
        rows = [f.decodes * nodes + f.prompt_rows for f in groups]
        most = max(f.decodes for f in groups) * nodes + max(f.prompt_rows for f in groups)
        padded = self.padding == "padded"
        if self.padding == "auto":
            padded = len(groups) * most - sum(rows) <= self.waste * len(groups) * most
        return StepPlan(
            step=table[0].step,
            decodes=tuple(f.decodes for f in groups),
            prompt_rows=tuple(f.prompt_rows for f in groups),
            finals=tuple(f.finals for f in groups),
            order_words=tuple(f.order_words for f in groups),
            padded=padded,
            num_steps=min(f.num_steps for f in groups),
            quiet=not any(f.requests for f in table),
            leaving=any(f.leaving for f in table),
            decode_us=tuple(f.decode_us for f in groups),
            mode=Mode(reduce(or_, (f.mode for f in groups))),
        )


class Call(NamedTuple):
    """One entry of a step's script: the exchange method that comes next, and the rows of each group that enter it.

    Rows are `width` wide; those of a head become `columns` logits on each rank. Where the head is sharded over the
    world, every rank goes on with the rows of all groups.
    """

    phase: str
    op: str
    rows: tuple[int, ...]
    width: int = 0
    columns: int = 0


class Ops(NamedTuple):
    """The exchange methods that one forward of a model calls, in order, and those that its head calls.

    `width` is the model's hidden size, `columns` the logits that a rank's shard of the head gives per row. A draft
    of several layers has `runners` models: at level l runner l runs the rows of levels 1 to l; at extend all run.
    `sharded` says what follows a head of which each rank has a shard.
    """

    forward: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    width: int = 0
    columns: int = 0
    sharded: ShardedHead | None = None
    runners: int = 1


def script(plan: StepPlan, shape: TreeShape, target: Ops, draft: Ops | None, followed: bool = False) -> list[Call]:
    """Every call of the exchange in a step of this plan, in order; `draft` is None in plain decoding. `followed`:
    groups have followers, with whom the leaders first share their orders.

    A rank that is about to make another call is out of step; `Exchange` raises before that can reach its peers.
    """
    if plan.empty or plan.leaving:
        return []
    r, c = plan.planned_decodes, plan.planned_prompt_rows
    levels = tuple(n * shape.topk for n in r)
    calls = [Call("order", "share", plan.order_words)] if followed else []

    def forward(phase: str, ops: Ops, rows: tuple[int, ...]) -> None:
        calls.extend(Call(phase, op, rows, ops.width) for op in ops.forward)

    def choice(phase: str, ops: Ops, rows: tuple[int, ...], told: int) -> None:
        calls.extend(Call(phase, op, rows, ops.width, ops.columns) for op in ops.head)
        if ops.sharded is not None:
            calls.extend(Call(phase, op, rows, width) for op, width in ops.sharded.choosing(plan.mode, told))

    if draft is not None:
        best = proposed(shape.topk, draft.columns)
        for level in range(1, shape.num_steps):
            forward("draft", draft, levels if draft.runners == 1 else tuple(n * level for n in levels))
            choice("draft", draft, levels, best)
    tree_rows = tuple(n * shape.num_draft_tokens for n in r)
    forward("target", target, tuple(a + b for a, b in zip(tree_rows, c, strict=True)))
    choice("target", target, tuple(a + f for a, f in zip(tree_rows, plan.finals, strict=True)), CHOSEN)
    width = shape.num_steps + 1
    if draft is not None:
        for _ in range(draft.runners):
            forward("extend", draft, tuple(n * width + b for n, b in zip(r, c, strict=True)))
        choice("extend", draft, tuple(n + f for n, f in zip(r, plan.finals, strict=True)), best)
    if target.sharded is not None and Mode.LOGPROBS in plan.mode:
        rows = tuple(n * width + f for n, f in zip(r, plan.finals, strict=True))
        calls.extend(Call("extend", op, rows, numbers) for op, numbers in target.sharded.asking(TOP_LOGPROBS))
    return calls
