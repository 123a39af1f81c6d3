"""The collectives around the sharded parts of a model, each checked against the script of the step.

Every rank makes the same calls, in the order of the script and with the planned numbers of rows. Over an axis (a group
of ranks) with one rank, nothing is sent. A rank that is about to make a wrong call, or a call with wrong row counts,
raises before it enters the collective: a wrong size can end a gloo process without a Python exception.

All ranks of an attention group have the same rows. In collectives over the world, each rank carries a share of these
rows, so that no row is sent twice. Legend: T own rows (of this rank's group), T' rows that this rank scores, H
hidden, v columns of a shard of the head, n shards, k numbers per row.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from cluster.capture.recorder import opaque
from cluster.distributed.mesh import Axis, GangError, Mesh, OutOfStepError
from cluster.dp_attention.all2all import (
    AllToAll,
    RowCounts,
    first_invalid_rank,
    pack_rows,
    send_receive_counts,
    unpack_rows,
)
from cluster.dp_attention.plan import ScriptCall
from cluster.dp_attention.step_input_codec import broadcast_from_leader
from cluster.models.exchange import ExpertParallelLayer, Shards

T = TypeVar("T")


class Exchange:
    """The exchange of one rank with the other ranks of a mesh. Implements two protocols: `TokenExchange`, and `Shards`
    for a sharded head.

    If `vocab_over_world`, embedding and head are sharded over all ranks, otherwise over the attention group. `ep_size`
    is the number of parts into which the experts are divided.
    """

    def __init__(self, mesh: Mesh, dtype: torch.dtype, vocab_over_world: bool = False, ep_size: int = 1) -> None:
        self._mesh, self._dtype, self.over_world = mesh, dtype, vocab_over_world and mesh.attn_dp > 1
        self._ep_size = ep_size
        self._vocab = mesh.world if self.over_world else mesh.attn
        self.size = self._vocab.size
        self.routes_to_experts = False
        self._script: deque[ScriptCall] = deque()
        self._current_call = ScriptCall("before the script", "", ())
        self._step = 0

    @property
    def shards(self) -> Shards | None:
        """The shards of embedding and head; None if there is only one shard."""
        return None if self.size == 1 else self

    def begin(self, step: int, calls: Iterable[ScriptCall], routes_to_experts: bool = False) -> None:
        """Begin a step with the calls of its script. `routes_to_experts` is as in `StepPlan`."""
        self._step, self._script, self.routes_to_experts = step, deque(calls), routes_to_experts

    @property
    def remaining_calls(self) -> tuple[ScriptCall, ...]:
        """The calls of the script that are not made yet."""
        return tuple(self._script)

    def replay(self, calls: Iterable[ScriptCall]) -> None:
        """Check that a captured program's `calls` are exactly the exchange calls that this step's script still has,
        then mark them all as made. The caller replays the program afterwards.

        Raises:
            OutOfStepError: names the first call that differs from the script.
        """
        for number, (call, planned) in enumerate(zip_longest(calls, self._script)):
            if call != planned:
                self._current_call = planned or self._current_call
                program_does = (
                    "ends" if call is None else f"calls {call.op} of rows {list(call.rows)} in phase {call.phase}"
                )
                script_says = "the step ends" if planned is None else f"{_describe(self._current_call)} comes next"
                raise self._out_of_step_error(
                    f"is about to replay a program that {program_does} as its call {number} where {script_says}"
                )
        self._script.clear()
        self._current_call = self._current_call._replace(phase="replay")

    def end(self) -> None:
        """Check that the step has made all calls of its script.

        Raises:
            OutOfStepError: names the first call left out.
        """
        if self._script:
            self._current_call = self._script[0]
            raise self._out_of_step_error(f"ended where {_describe(self._current_call)} comes next")

    def share(self, integers: list[int]) -> list[int]:
        """Broadcast the leader's `integers` (a packed step input) to the attention group, over gloo."""
        axis, count = self._mesh.attn_facts, self._next_call("share").rows[self._mesh.dp_rank]
        if self._mesh.is_leader and len(integers) != count:
            raise self._out_of_step_error(f"brings {len(integers)} words to share where {count} are planned")
        return self._run_collective(axis, broadcast_from_leader, integers, count, axis)

    def reduce(self, rows: Tensor) -> Tensor:
        """Partial sums of own rows `[T, ..]` -> their sum over the attention group."""
        call = self._next_call("reduce")
        self._check_shape(rows, self._own_rows(call), call.width)
        return self._all_reduce(rows)

    def gather(self, rows: Tensor) -> Tensor:
        """Own rows `[T, H]` -> the rows of every group."""
        call = self._next_call("gather")
        self._check_shape(rows, self._own_rows(call), call.width)
        return self._all_gather_rows(rows, call)

    def scatter(self, rows: Tensor, group_sums: Tensor | None = None) -> Tensor:
        """Partial sums for the rows of every group -> own rows `[T, H]`, summed over the world. `group_sums` `[T, H]`
        are further partial sums for own rows (None: there are none); they are added to `rows` in place.
        """
        call = self._next_call("scatter")
        if group_sums is not None:
            own_rows = self._own_rows(call)
            self._check_shape(rows, sum(call.rows), call.width)
            self._check_shape(group_sums, own_rows, call.width)
            rows.narrow(0, sum(call.rows[: self._mesh.dp_rank]), own_rows).add_(group_sums)
        return self._reduce_scatter(rows, call)

    def to_experts(self, rows: Tensor, experts: ExpertParallelLayer, group_sums: Tensor | None) -> Tensor:
        """Own rows `[T, H]` -> the sums of their experts' outputs, `[T, H]`; `group_sums` is as in `scatter`. Partial
        sums are added in the same order as `gather` and `scatter` add them over gloo. The ranks first exchange counts.
        Then each rank sends the rows that it carries to the ranks that hold the experts of these rows.
        """
        start, stop = self._mesh.attn.shard.span(rows.shape[0])  # each rank of a group carries a share of its rows
        own_rows = rows[start:stop]
        weights, expert_ids, ep_ranks = experts.choose(own_rows)
        all2all = AllToAll(ep_ranks, self._ep_size, self._mesh.world.size)
        row_counts = self.counts(all2all)
        received = self.dispatch(pack_rows(own_rows, weights, expert_ids)[all2all.rows], row_counts, all2all)
        outputs = experts.run(*unpack_rows(received, expert_ids.shape[1]))
        return self.combine(outputs, row_counts, all2all, group_sums)

    def counts(self, all2all: AllToAll) -> RowCounts:
        """Return how many rows each rank sends to each part of the experts. `all2all` has the counts of this rank.

        Raises:
            OutOfStepError: the counts of a rank are impossible for the planned rows.
        """
        call, mesh = self._next_call("counts"), self._mesh
        planned_rows = self._rows_per_rank(call)
        if (all2all.num_rows, len(all2all.counts)) != (planned_rows[mesh.rank], call.width):
            actual = f"brings counts of {all2all.num_rows} rows for {len(all2all.counts)} parts"
            raise self._out_of_step_error(
                f"{actual} where {planned_rows[mesh.rank]} rows for {call.width} parts are planned"
            )
        row_counts = self._run_collective(mesh.facts, lambda: tuple(mesh.all_gather_row(all2all.counts)))
        invalid_rank = first_invalid_rank(row_counts, planned_rows, call.columns)
        if invalid_rank is not None:
            problem = f"counts {list(row_counts[invalid_rank])} of {planned_rows[invalid_rank]} rows, which cannot be"
            raise self._out_of_step_error(f"tells {problem}", invalid_rank)
        return row_counts

    def dispatch(self, rows: Tensor, row_counts: RowCounts, all2all: AllToAll) -> Tensor:
        """Send `rows`, in order of destination rank. Return the rows that other ranks, and this one, send to the
        experts of this rank, in order of source rank. `row_counts` is what `counts` returned.

        Raises:
            OutOfStepError: the rows do not match `row_counts`.
        """
        call, world = self._next_call("dispatch"), self._mesh.world
        send_counts, receive_counts = send_receive_counts(row_counts, world.rank)
        if all2all.counts != row_counts[world.rank]:
            raise self._out_of_step_error(
                f"is about to dispatch {list(all2all.counts)} rows and told {list(row_counts[world.rank])}"
            )
        self._check_shape(rows, sum(send_counts), call.width)
        return self._run_collective(world, world.all_to_all, rows, send_counts, receive_counts)

    def combine(self, outputs: Tensor, row_counts: RowCounts, all2all: AllToAll, common: Tensor | None) -> Tensor:
        """Send each of the partial sums `outputs` back to the rank that carries its row, and return the sums of own
        rows, `[T, H]`. `outputs` are in the order in which `dispatch` returned the rows. `common` is what `scatter`
        calls `group_sums`.
        """
        call, mesh = self._next_call("combine"), self._mesh
        rows_per_rank, (dispatched_counts, received_counts) = (
            self._rows_per_rank(call),
            send_receive_counts(row_counts, mesh.rank),
        )
        self._check_shape(outputs, sum(received_counts), call.width)
        returned, group_ranks = list(torch.split(outputs, received_counts)), range(0)
        if common is not None:
            self._check_shape(common, self._own_rows(call), call.width)
            # Sums of `common` stay in the group: append, for each rank of the group, those of the rows that it carries.
            group_ranks = range(mesh.dp_rank * mesh.attn.size, (mesh.dp_rank + 1) * mesh.attn.size)
            for rank, common_rows in zip(
                group_ranks, torch.split(common, rows_per_rank[group_ranks.start : group_ranks.stop]), strict=True
            ):
                returned[rank] = torch.cat([returned[rank], common_rows])
            dispatched_counts = [
                count + (rank in group_ranks) * rows_per_rank[mesh.rank] for rank, count in enumerate(dispatched_counts)
            ]
        # On the way back this rank sends `send_counts[r]` rows to rank r, and takes `dispatched_counts[r]` from it.
        send_counts = [rows.shape[0] for rows in returned]
        received = self._run_collective(
            mesh.world, mesh.world.all_to_all, torch.cat(returned), send_counts, dispatched_counts
        )
        return self._gather_group(all2all.sum_received(received, group_ranks), call)

    def embed(self, ids: Tensor, lookup: Callable[[Tensor], Tensor]) -> Tensor:
        """Token ids `[T]` -> rows `[T, H]`. `lookup` returns this shard's rows, and zeros for ids of other shards."""
        call = self._next_call("embed")
        self._check_shape(ids, self._own_rows(call))
        if self.over_world:
            return self._reduce_scatter(lookup(self._all_gather_rows(ids, call)), call)
        rows = lookup(ids)
        self._check_shape(rows, self._own_rows(call), call.width)
        return self._all_reduce(rows)

    def head(self, rows: Tensor, project: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        """Rows `[T, H]` -> two values: this shard's logits `[T', v]`, which `project` computes, and the index of the
        first own row among the T' rows.
        """
        call = self._next_call("head")
        self._check_shape(rows, self._own_rows(call), call.width)
        logits = project(self._all_gather_rows(rows, call) if self.over_world else rows)
        self._check_shape(logits, self._num_scored_rows(call), call.columns)
        return logits, self._first_own_row(call)

    def spread(self, numbers: Tensor) -> Tensor:
        """Int64 numbers of own rows `[T, k]` -> those of the rows of every group, `[T', k]`. Only if `over_world`."""
        call = self._next_call("spread")
        self._check_shape(numbers, self._own_rows(call), call.width, torch.int64)
        return self._all_gather_rows(numbers, call)

    def highest(self, numbers: Tensor) -> Tensor:
        """A float64 of each row scored, `[T', 1]` -> the maximum over all shards."""
        call = self._next_call("highest")
        self._check_shape(numbers, self._num_scored_rows(call), call.width, torch.float64)
        return self._all_gather_shards(numbers).amax(0)

    def add(self, numbers: Tensor) -> Tensor:
        """Int64 numbers of each row scored, `[T', k]` -> their sums over all shards."""
        call = self._next_call("add")
        self._check_shape(numbers, self._num_scored_rows(call), call.width, torch.int64)
        return self._run_collective(self._vocab, self._vocab.all_reduce, numbers)

    def compare(self, numbers: Tensor) -> Tensor:
        """Float64 numbers of each row scored, `[T', k]` -> the numbers of all shards for own rows, `[n, T, k]`."""
        call = self._next_call("compare")
        self._check_shape(numbers, self._num_scored_rows(call), call.width, torch.float64)
        first = self._first_own_row(call)
        return self._all_gather_shards(numbers)[:, first : first + self._own_rows(call)]

    def _next_call(self, op: str) -> ScriptCall:
        """Take the next call off the script, and return it. Raise `OutOfStepError` if it is not `op`."""
        if not self._script:
            self._current_call = self._current_call._replace(phase=f"after {self._current_call.phase}")
            raise self._out_of_step_error(f"calls {op} where the step ends")
        self._current_call = self._script.popleft()
        self._mesh.enter(self._current_call.phase, self._step)
        if self._current_call.op != op:
            raise self._out_of_step_error(f"calls {op} where {_describe(self._current_call)} comes next")
        return self._current_call

    def _check_shape(
        self, rows: Tensor, count: int, width: int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Raise unless `rows` is `[count, width]`, or `[count]` if `width` is None (token ids), and of the planned
        dtype: int64 for token ids, otherwise `dtype` (None: the compute dtype).
        """
        planned = (count,) if width is None else (count, width)
        dtype = torch.int64 if width is None else dtype or self._dtype
        if rows.shape != planned or rows.dtype != dtype:
            actual = f"brings {list(rows.shape)} of {rows.dtype}"
            raise self._out_of_step_error(
                f"{actual} to {self._current_call.op} where {list(planned)} of {dtype} are planned"
            )

    def _own_rows(self, call: ScriptCall) -> int:
        return call.rows[self._mesh.dp_rank]

    def _num_scored_rows(self, call: ScriptCall) -> int:
        """T', the number of rows that each shard of the vocabulary scores."""
        return sum(call.rows) if self.over_world else self._own_rows(call)

    def _first_own_row(self, call: ScriptCall) -> int:
        """The index of the first own row among the rows scored."""
        return sum(call.rows[: self._mesh.dp_rank]) if self.over_world else 0

    def _out_of_step_error(self, problem: str, rank: int | None = None) -> OutOfStepError:
        """Return the error that says that `rank` (None: this rank) is out of step, and why (`problem`)."""
        rank, phase = self._mesh.rank if rank is None else rank, self._current_call.phase
        return OutOfStepError(f"rank {rank} {problem} (step {self._step}, phase {phase})", rank, self._step, phase)

    def _run_collective(self, axis: Axis, collective: Callable[..., T], *arguments: Any) -> T:
        """Run one collective over `axis`, and check that it was entered exactly once (if `axis` has more than one
        rank). Callers pass tensors in `arguments`, not in a closure: a tape (a program captured on a CPU) could not
        reuse the buffers of tensors that a recorded closure holds.
        """
        if axis.size == 1:
            return collective(*arguments)
        result: T = opaque(self._enter_collective, self._current_call, collective, *arguments)
        return result

    def _enter_collective(self, call: ScriptCall, collective: Callable[..., T], *arguments: Any) -> T:
        """Run the collective of `call` and return its result. A tape (a program captured on a CPU) calls this method
        again in every replay.
        """
        clock = self._mesh.world.clock
        expected_calls = clock.collectives_returned + 1
        try:
            result = collective(*arguments)
        except GangError:
            raise
        except RuntimeError as error:
            # A lost peer shows as a RuntimeError of the backend.
            peer_loss = self._mesh.peer_loss(error, in_collective=True)
            if peer_loss is None:
                raise
            raise peer_loss from error
        if clock.collectives_returned != expected_calls:
            raise self._out_of_step_error(f"did not enter the collective of {_describe(call)} exactly once")
        return result

    def _rows_per_rank(self, call: ScriptCall) -> list[int]:
        """Return the number of rows that each rank of the world carries."""
        return [count for rows in call.rows for count in _split_over_group(rows, self._mesh.attn.size)]

    def _all_reduce(self, rows: Tensor) -> Tensor:
        """Partial sums of own rows -> their sum over the attention group."""
        attn = self._mesh.attn
        return self._run_collective(attn, attn.all_reduce, rows)

    def _all_gather_rows(self, rows: Tensor, call: ScriptCall) -> Tensor:
        """Own rows -> the rows of every group. With one group, own rows are all rows."""
        world = self._mesh.world
        if self._mesh.attn_dp == 1:
            return rows
        start, stop = self._mesh.attn.shard.span(rows.shape[0])
        counts = self._rows_per_rank(call)
        return self._run_collective(world, lambda own: world.gather(own, counts), rows[start:stop])

    def _all_gather_shards(self, numbers: Tensor) -> Tensor:
        """Numbers of the rows scored, `[T', k]` -> the numbers of all shards, `[n, T', k]`."""
        axis, (count, width) = self._vocab, numbers.shape
        gathered = self._run_collective(axis, lambda own: axis.gather(own, [count] * axis.size), numbers)
        return gathered.view(axis.size, count, width)

    def _reduce_scatter(self, rows: Tensor, call: ScriptCall) -> Tensor:
        """Partial sums of every group's rows -> own rows, summed over the world."""
        world = self._mesh.world
        self._check_shape(rows, sum(call.rows), call.width)
        if self._mesh.attn_dp == 1:
            return self._run_collective(world, world.all_reduce, rows)
        counts = self._rows_per_rank(call)
        return self._gather_group(
            self._run_collective(world, lambda partial_sums: world.reduce_scatter(partial_sums, counts), rows), call
        )

    def _gather_group(self, carried_rows: Tensor, call: ScriptCall) -> Tensor:
        """The rows that this rank carries -> all rows of its group."""
        attn = self._mesh.attn
        counts = _split_over_group(self._own_rows(call), attn.size)
        return self._run_collective(attn, lambda rows: attn.gather(rows, counts), carried_rows)


def _split_over_group(rows: int, num_ranks: int) -> list[int]:
    """Return how many of a group's `rows` each of its ranks carries. `Shard.span` divides them in the same way."""
    return [rows * (rank + 1) // num_ranks - rows * rank // num_ranks for rank in range(num_ranks)]


def _describe(call: ScriptCall) -> str:
    return f"{call.op} of rows {list(call.rows)}"
