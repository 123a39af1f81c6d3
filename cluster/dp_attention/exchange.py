"""How rows travel between ranks around the sharded parts of a model, held to the step's script.

Every method is called by every rank, in the order of the script and with its rows; with one rank in an axis it is the
identity. A rank that would call something else raises before it enters a collective.
"""

from collections import deque
from collections.abc import Callable, Iterable

from torch import Tensor

from cluster.dp_attention.plan import Call
from cluster.mesh import GangError, Mesh, OutOfStepError


class Exchange:
    """`TokenExchange` over a mesh. The rows of an attention group are the same on each of its ranks.

    `vocab_over_world`: embedding and head are sharded over all ranks; otherwise over the attention group.
    """

    def __init__(self, mesh: Mesh, vocab_over_world: bool = False) -> None:
        self._mesh, self._wide = mesh, vocab_over_world and mesh.attn_dp > 1
        self._script: deque[Call] = deque()
        self._step = 0

    def begin(self, step: int, calls: Iterable[Call]) -> None:
        """The script of the step that begins."""
        self._step, self._script = step, deque(calls)

    def end(self) -> None:
        """Refuse a step that left calls out.

        Raises:
            OutOfStepError: naming the first one.
        """
        if self._script:
            call = self._script[0]
            raise self._off(call.phase, f"ended where {call.op} of rows {list(call.rows)} comes next")

    def reduce(self, rows: Tensor) -> Tensor:
        """Partial sums of own rows `[T, ..]` over the attention group -> their sum."""
        self._next("reduce", rows.shape[0])
        return self._run(self._mesh.attn.all_reduce, rows)

    def gather(self, rows: Tensor) -> Tensor:
        """Own rows `[T, H]` -> the rows of every group."""
        return self._spread(rows, self._next("gather", rows.shape[0]))

    def scatter(self, rows: Tensor) -> Tensor:
        """Partial sums for the rows of every group -> own rows `[T, H]`, summed."""
        return self._collect(rows, self._next("scatter"))

    def embed(self, ids: Tensor, lookup: Callable[[Tensor], Tensor]) -> Tensor:
        """Token ids `[T]` -> rows `[T, H]`, where `lookup` gives zeros for ids of another shard."""
        call = self._next("embed", ids.shape[0])
        if not self._wide:
            return self._run(self._mesh.attn.all_reduce, lookup(ids))
        return self._collect(lookup(self._spread(ids, call)), call)

    def head(self, rows: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows `[T, H]` -> logits of all shards `[T, n * v]`, where `project` gives this shard's columns `[T, v]`."""
        call = self._next("head", rows.shape[0])
        attn = self._mesh.attn
        if not self._wide:
            logits, own = project(rows), rows.shape[0]
            return self._run(lambda r: attn.swap(r.repeat(attn.size, 1), [own] * attn.size), logits)
        counts = self._counts(call)
        mine = self._run(lambda r: self._mesh.world.swap(r, counts), project(self._spread(rows, call)))
        return self._join(mine, call)

    def _next(self, op: str, rows: int | None = None) -> Call:
        """The call that the script has next, which must be this one."""
        if not self._script:
            raise self._off("after the script", f"calls {op} where the step ends")
        call = self._script.popleft()
        self._mesh.position = (self._step, call.phase)
        if call.op != op:
            raise self._off(call.phase, f"calls {op} where {call.op} of rows {list(call.rows)} comes next")
        planned = call.rows[self._mesh.dp_rank]
        if rows is not None and rows != planned:
            raise self._off(call.phase, f"brings {rows} rows to {op} where {planned} are planned")
        return call

    def _off(self, phase: str, what: str) -> OutOfStepError:
        rank = self._mesh.rank
        return OutOfStepError(f"rank {rank} {what} (step {self._step}, phase {phase})", rank, self._step, phase)

    def _run(self, collective: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        try:
            return collective(rows)
        except GangError:
            raise
        except RuntimeError as error:
            raise self._mesh.explain(error) from error

    def _counts(self, call: Call) -> list[int]:
        """Rows that each rank of the world sends: a group's ranks share its rows among them."""
        n = self._mesh.attn.size
        return [rows * (i + 1) // n - rows * i // n for rows in call.rows for i in range(n)]

    def _spread(self, rows: Tensor, call: Call) -> Tensor:
        """Own rows -> those of every group. With one group everybody has them already."""
        if self._mesh.attn_dp == 1:
            return rows
        start, stop = self._mesh.attn.part.span(rows.shape[0])
        counts = self._counts(call)
        return self._run(lambda r: self._mesh.world.gather(r, counts), rows[start:stop])

    def _collect(self, rows: Tensor, call: Call) -> Tensor:
        """Partial sums of every group's rows -> own rows, summed over the world."""
        if self._mesh.attn_dp == 1:
            return self._run(self._mesh.world.all_reduce, rows)
        counts = self._counts(call)
        mine = self._run(lambda r: self._mesh.world.reduce_scatter(r, counts), rows)
        return self._join(mine, call)

    def _join(self, mine: Tensor, call: Call) -> Tensor:
        """This rank's share of its group's rows -> all rows of the group."""
        attn = self._mesh.attn
        planned = call.rows[self._mesh.dp_rank]
        counts = [planned * (i + 1) // attn.size - planned * i // attn.size for i in range(attn.size)]
        return self._run(lambda r: attn.gather(r, counts), mine)
