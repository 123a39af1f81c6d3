"""The collectives around the sharded parts of a model, each checked against the script of the step.

Every rank makes the same calls, in the order of the script and with the planned numbers of rows. Over an axis of one
rank a call is the identity. A rank that is about to make a wrong call, or a call with wrong row counts, raises before
it enters the collective: a wrong size can end a gloo process without a Python exception.
Legend: T own rows (of this rank's group), T' rows scored, H hidden, v columns of a shard, n shards, k numbers.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from cluster.capture.recorder import opaque
from cluster.distributed.mesh import Axis, GangError, Mesh, OutOfStepError
from cluster.dp_attention.all2all import AllToAll, Table, flows, impossible, packed, unpacked
from cluster.dp_attention.plan import ScriptCall
from cluster.dp_attention.step_input_codec import shared
from cluster.models.exchange import ExpertParallelLayer, Shards

T = TypeVar("T")


class Exchange:
    """`TokenExchange` over a mesh, and `Shards` of embedding and head. All ranks of a group have the same rows.

    If `vocab_over_world`, embedding and head are sharded over all ranks, otherwise over the attention group. `parts` is
    the number of parts of the experts.
    """

    def __init__(self, mesh: Mesh, dtype: torch.dtype, vocab_over_world: bool = False, parts: int = 1) -> None:
        self._mesh, self._dtype, self.wide = mesh, dtype, vocab_over_world and mesh.attn_dp > 1
        self._parts = parts
        self._vocab = mesh.world if self.wide else mesh.attn
        self.size = self._vocab.size
        self.counted = False
        self._script: deque[ScriptCall] = deque()
        self._call = ScriptCall("before the script", "", ())
        self._step = 0

    @property
    def shards(self) -> Shards | None:
        """The shards of embedding and head; None if there is only one shard."""
        return None if self.size == 1 else self

    def begin(self, step: int, calls: Iterable[ScriptCall], counted: bool = False) -> None:
        """Begin a step with the calls of its script. `counted` is `StepPlan.counted`."""
        self._step, self._script, self.counted = step, deque(calls), counted

    @property
    def rest(self) -> tuple[ScriptCall, ...]:
        """The calls of the script that are not made yet."""
        return tuple(self._script)

    def replay(self, calls: Iterable[ScriptCall]) -> None:
        """Check the `calls` of a captured program against the rest of the script, before the program is replayed.

        Raises:
            OutOfStepError: names the first call that differs from the script.
        """
        for number, (call, planned) in enumerate(zip_longest(calls, self._script)):
            if call != planned:
                self._call = planned or self._call
                would = "ends" if call is None else f"calls {call.op} of rows {list(call.rows)} in phase {call.phase}"
                comes = "the step ends" if planned is None else f"{_words(self._call)} comes next"
                raise self._off(f"is about to replay a program that {would} as its call {number} where {comes}")
        self._script.clear()
        self._call = self._call._replace(phase="replay")

    def end(self) -> None:
        """Check that the step has made all calls of its script.

        Raises:
            OutOfStepError: names the first call left out.
        """
        if self._script:
            self._call = self._script[0]
            raise self._off(f"ended where {_words(self._call)} comes next")

    def share(self, words: list[int]) -> list[int]:
        """Broadcast the leader's `words` (a packed step input) to the attention group, over gloo."""
        attn, count = self._mesh.attn_facts, self._next("share").rows[self._mesh.dp_rank]
        if self._mesh.leads and len(words) != count:
            raise self._off(f"brings {len(words)} words to share where {count} are planned")
        return self._run(attn, shared, words, count, attn)

    def reduce(self, rows: Tensor) -> Tensor:
        """Partial sums of own rows `[T, ..]` -> their sum over the attention group."""
        call = self._next("reduce")
        self._check(rows, self._own(call), call.width)
        return self._summed(rows)

    def gather(self, rows: Tensor) -> Tensor:
        """Own rows `[T, H]` -> the rows of every group."""
        call = self._next("gather")
        self._check(rows, self._own(call), call.width)
        return self._spread(rows, call)

    def scatter(self, rows: Tensor, common: Tensor | None = None) -> Tensor:
        """Partial sums for the rows of every group -> own rows `[T, H]`, summed over the world. `common` `[T, H]` are
        further partial sums for own rows; they are added to `rows` in place.
        """
        call = self._next("scatter")
        if common is not None:
            own = self._own(call)
            self._check(rows, sum(call.rows), call.width)
            self._check(common, own, call.width)
            rows.narrow(0, sum(call.rows[: self._mesh.dp_rank]), own).add_(common)
        return self._collect(rows, call)

    def to_experts(self, rows: Tensor, experts: ExpertParallelLayer, common: Tensor | None) -> Tensor:
        """Own rows `[T, H]` -> the sums of their experts' outputs, equal bit by bit to those of `gather` and `scatter`.
        Ranks first exchange counts. Then each rank sends the rows that it carries to the ranks that hold their experts.
        """
        start, stop = self._mesh.attn.part.span(rows.shape[0])  # each rank of a group carries a share of its rows
        mine = rows[start:stop]
        weights, chosen, parts = experts.choose(mine)
        all2all = AllToAll(parts, self._parts, self._mesh.world.size)
        table = self.counts(all2all)
        came = self.dispatch(packed(mine, weights, chosen)[all2all.rows], table, all2all)
        made = experts.run(*unpacked(came, chosen.shape[1]))
        return self.combine(made, table, all2all, common)

    def counts(self, all2all: AllToAll) -> Table:
        """All-gather how many rows each rank sends to each part of the experts. `all2all` has the counts of this rank.

        Raises:
            OutOfStepError: the counts of a rank are impossible for the planned rows.
        """
        call, mesh = self._next("counts"), self._mesh
        carried = self._counts(call)
        if (all2all.carried, len(all2all.counts)) != (carried[mesh.rank], call.width):
            brings = f"brings counts of {all2all.carried} rows for {len(all2all.counts)} parts"
            raise self._off(f"{brings} where {carried[mesh.rank]} rows for {call.width} parts are planned")
        table = self._run(mesh.facts, lambda: tuple(mesh.all_gather_row(all2all.counts)))
        odd = impossible(table, carried, call.columns)
        if odd is not None:
            what = f"counts {list(table[odd])} of {carried[odd]} rows, which cannot be"
            raise self._off(f"tells {what}", odd)
        return table

    def dispatch(self, rows: Tensor, table: Table, all2all: AllToAll) -> Tensor:
        """Rows in order of destination rank -> the rows that come to the experts of this rank, in order of source rank.

        Raises:
            OutOfStepError: the rows do not match the `table` of counts.
        """
        call, world = self._next("dispatch"), self._mesh.world
        sent, taken = flows(table, world.rank)
        if all2all.counts != table[world.rank]:
            raise self._off(f"is about to dispatch {list(all2all.counts)} rows and told {list(table[world.rank])}")
        self._check(rows, sum(sent), call.width)
        return self._run(world, world.all_to_all, rows, sent, taken)

    def combine(self, made: Tensor, table: Table, all2all: AllToAll, common: Tensor | None) -> Tensor:
        """Send back the partial sums `made`, which are in the order of the rows that came, each to the rank that
        carries its row. Return own rows, summed; `common` is as in `scatter`.
        """
        call, mesh = self._next("combine"), self._mesh
        carried, (sent, taken) = self._counts(call), flows(table, mesh.rank)
        self._check(made, sum(taken), call.width)
        back, group = list(torch.split(made, taken)), range(0)
        if common is not None:
            self._check(common, self._own(call), call.width)
            # Sums of `common` stay in the group: append for each of its ranks the sums of the rows that it carries.
            group = range(mesh.dp_rank * mesh.attn.size, (mesh.dp_rank + 1) * mesh.attn.size)
            for rank, more in zip(group, torch.split(common, carried[group.start : group.stop]), strict=True):
                back[rank] = torch.cat([back[rank], more])
            sent = [count + (rank in group) * carried[mesh.rank] for rank, count in enumerate(sent)]
        # On the way back this rank sends `gone[r]` rows to rank r, and takes `sent[r]` rows from it.
        gone = [rows.shape[0] for rows in back]
        came = self._run(mesh.world, mesh.world.all_to_all, torch.cat(back), gone, sent)
        return self._join(all2all.summed(came, group), call)

    def embed(self, ids: Tensor, lookup: Callable[[Tensor], Tensor]) -> Tensor:
        """Token ids `[T]` -> rows `[T, H]`, where `lookup` gives zeros for ids of another shard."""
        call = self._next("embed")
        self._check(ids, self._own(call))
        if self.wide:
            return self._collect(lookup(self._spread(ids, call)), call)
        rows = lookup(ids)
        self._check(rows, self._own(call), call.width)
        return self._summed(rows)

    def head(self, rows: Tensor, project: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        """Rows `[T, H]` -> this shard's logits `[T', v]` of the rows scored here, computed by `project`; and the index
        of the first own row among these rows.
        """
        call = self._next("head")
        self._check(rows, self._own(call), call.width)
        logits = project(self._spread(rows, call) if self.wide else rows)
        self._check(logits, self._scored(call), call.columns)
        return logits, self._first(call)

    def spread(self, numbers: Tensor) -> Tensor:
        """Int64 numbers of own rows `[T, k]` -> the numbers of the rows of every group, `[T', k]`."""
        call = self._next("spread")
        self._check(numbers, self._own(call), call.width, torch.int64)
        return self._spread(numbers, call)

    def highest(self, numbers: Tensor) -> Tensor:
        """A float64 of each row scored, `[T', 1]` -> the maximum over all shards."""
        call = self._next("highest")
        self._check(numbers, self._scored(call), call.width, torch.float64)
        return self._every(numbers).amax(0)

    def add(self, numbers: Tensor) -> Tensor:
        """Int64 numbers of each row scored, `[T', k]` -> their sums over all shards."""
        call = self._next("add")
        self._check(numbers, self._scored(call), call.width, torch.int64)
        return self._run(self._vocab, self._vocab.all_reduce, numbers)

    def compare(self, numbers: Tensor) -> Tensor:
        """Float64 numbers of each row scored, `[T', k]` -> the numbers of all shards for own rows, `[n, T, k]`."""
        call = self._next("compare")
        self._check(numbers, self._scored(call), call.width, torch.float64)
        first = self._first(call)
        return self._every(numbers)[:, first : first + self._own(call)]

    def _next(self, op: str) -> ScriptCall:
        """Take the next call off the script; it must be `op`."""
        if not self._script:
            self._call = self._call._replace(phase=f"after {self._call.phase}")
            raise self._off(f"calls {op} where the step ends")
        self._call = self._script.popleft()
        self._mesh.enter(self._call.phase, self._step)
        if self._call.op != op:
            raise self._off(f"calls {op} where {_words(self._call)} comes next")
        return self._call

    def _check(self, rows: Tensor, count: int, width: int | None = None, dtype: torch.dtype | None = None) -> None:
        """Raise unless `rows` have the planned shape and dtype; `width` is None for token ids `[T]`."""
        planned = (count,) if width is None else (count, width)
        dtype = torch.int64 if width is None else dtype or self._dtype
        if rows.shape != planned or rows.dtype != dtype:
            brings = f"brings {list(rows.shape)} of {rows.dtype}"
            raise self._off(f"{brings} to {self._call.op} where {list(planned)} of {dtype} are planned")

    def _own(self, call: ScriptCall) -> int:
        return call.rows[self._mesh.dp_rank]

    def _scored(self, call: ScriptCall) -> int:
        """T', the number of rows that each shard of the vocabulary scores."""
        return sum(call.rows) if self.wide else self._own(call)

    def _first(self, call: ScriptCall) -> int:
        """The index of the first own row among the rows scored."""
        return sum(call.rows[: self._mesh.dp_rank]) if self.wide else 0

    def _off(self, what: str, rank: int | None = None) -> OutOfStepError:
        """The error that says that this rank, or `rank`, is out of step."""
        rank, phase = self._mesh.rank if rank is None else rank, self._call.phase
        return OutOfStepError(f"rank {rank} {what} (step {self._step}, phase {phase})", rank, self._step, phase)

    def _run(self, axis: Axis, collective: Callable[..., T], *given: Any) -> T:
        """Run one collective over `axis`, and check that the collective was entered exactly once. Pass its tensors in
        `given`, not in a closure: a tape could not reuse the buffers of tensors that a recorded closure holds.
        """
        if axis.size == 1:
            return collective(*given)
        result: T = opaque(self._entered, self._call, collective, *given)
        return result

    def _entered(self, call: ScriptCall, collective: Callable[..., T], *given: Any) -> T:
        """Return the result of the collective of `call`. A tape makes this call again in every replay."""
        clock = self._mesh.world.clock
        entered = clock.calls + 1
        try:
            result = collective(*given)
        except GangError:
            raise
        except RuntimeError as error:
            lost = self._mesh.loss(error, in_collective=True)  # a lost peer shows as a RuntimeError of the backend
            if lost is None:
                raise
            raise lost from error
        if clock.calls != entered:
            raise self._off(f"did not enter the collective of {_words(call)} exactly once")
        return result

    def _counts(self, call: ScriptCall) -> list[int]:
        """The rows that each rank of the world carries: the ranks of a group split its rows as `Shard.span` does."""
        n = self._mesh.attn.size
        return [rows * (i + 1) // n - rows * i // n for rows in call.rows for i in range(n)]

    def _summed(self, rows: Tensor) -> Tensor:
        """Partial sums of own rows -> their sum over the attention group."""
        attn = self._mesh.attn
        return self._run(attn, attn.all_reduce, rows)

    def _spread(self, rows: Tensor, call: ScriptCall) -> Tensor:
        """Own rows -> the rows of every group. With one group, own rows are all rows."""
        world = self._mesh.world
        if self._mesh.attn_dp == 1:
            return rows
        start, stop = self._mesh.attn.part.span(rows.shape[0])
        counts = self._counts(call)
        return self._run(world, lambda own: world.gather(own, counts), rows[start:stop])

    def _every(self, numbers: Tensor) -> Tensor:
        """Numbers of the rows scored, `[T', k]` -> the numbers of all shards, `[n, T', k]`."""
        axis, (count, width) = self._vocab, numbers.shape
        every = self._run(axis, lambda own: axis.gather(own, [count] * axis.size), numbers)
        return every.view(axis.size, count, width)

    def _collect(self, rows: Tensor, call: ScriptCall) -> Tensor:
        """Partial sums of every group's rows -> own rows, summed over the world."""
        world = self._mesh.world
        self._check(rows, sum(call.rows), call.width)
        if self._mesh.attn_dp == 1:
            return self._run(world, world.all_reduce, rows)
        counts = self._counts(call)
        return self._join(self._run(world, lambda sums: world.reduce_scatter(sums, counts), rows), call)

    def _join(self, mine: Tensor, call: ScriptCall) -> Tensor:
        """The rows that this rank carries -> all rows of its group."""
        attn, planned = self._mesh.attn, self._own(call)
        counts = [planned * (i + 1) // attn.size - planned * i // attn.size for i in range(attn.size)]
        return self._run(attn, lambda own: attn.gather(own, counts), mine)


def _words(call: ScriptCall) -> str:
    return f"{call.op} of rows {list(call.rows)}"
