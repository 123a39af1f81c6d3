"""A model's shards in one process: a thread per rank, and an exchange that adds their parts up in rank order."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

from cluster.arch import TargetArch
from cluster.attention.gather import Gather
from cluster.batch import AttentionMetadata, HostBounds, PromptRows
from cluster.distributed.mesh import Shard
from cluster.engine.backends import bind_attention
from cluster.kernels.interface import Kernels
from cluster.models.exchange import NoExchange, TokenExchange
from cluster.models.load import local_heads
from cluster.models.vocab import ShardedLogits
from tests.loading import context, load_target
from tests.tables import table_of

T = TypeVar("T")
CPU = torch.device("cpu")


class Summed:
    """The exchange of rank `rank` among those that share `table` and `barrier`; it notes what it was called.

    Nothing is chosen here, so its shards of a head have nothing to tell each other.
    """

    shards = None

    def __init__(self, rank: int, table: list[Any], barrier: Barrier) -> None:
        self._rank, self._table, self._barrier = rank, table, barrier
        self.ops: list[str] = []

    def _all(self, rows: Tensor) -> list[Tensor]:
        self._table[self._rank] = rows
        self._barrier.wait(60)
        every = list(self._table)
        self._barrier.wait(60)
        return every

    def _sum(self, op: str, rows: Tensor) -> Tensor:
        self.ops.append(op)
        return torch.stack(self._all(rows)).sum(0)

    def reduce(self, rows: Tensor) -> Tensor:
        return self._sum("reduce", rows)

    def gather(self, rows: Tensor) -> Tensor:
        self.ops.append("gather")
        return rows

    def scatter(self, rows: Tensor) -> Tensor:
        return self._sum("scatter", rows)

    def embed(self, ids: Tensor, lookup: Callable[[Tensor], Tensor]) -> Tensor:
        return self._sum("embed", lookup(ids))

    def head(self, rows: Tensor, project: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        self.ops.append("head")
        return project(rows), 0

    def logits(self, columns: ShardedLogits) -> Tensor:
        """All columns, `[T, V]`."""
        return torch.cat(self._all(columns.values), -1)[:, : columns.vocab]


def on_shards(size: int, run: Callable[[Shard, Summed], T]) -> list[T]:
    """What `run` gives on each of `size` ranks, in threads."""
    table: list[Any] = [None] * size
    barrier = Barrier(size)

    def rank_of(rank: int) -> T:
        try:
            return run(Shard(rank, size), Summed(rank, table, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_of, range(size)))


def run_text(
    folder: str, tokens: list[int], chunks: list[int], size: int, kernels: Kernels | None = None
) -> list[tuple[Tensor, list[Tensor]]]:
    """Logits `[T, V]` and every boundary of the text on each of `size` ranks, in chunks over scattered pages; by
    `kernels`, or those that this machine has.
    """
    alone = NoExchange() if size == 1 else None
    return on_shards(size, lambda part, shared: _run(folder, tokens, chunks, part, alone or shared, kernels))


@torch.inference_mode()
def _run(
    folder: str, tokens: list[int], chunks: list[int], part: Shard, exchange: TokenExchange, kernels: Kernels | None
) -> tuple[Tensor, list[Tensor]]:
    count, slots = len(tokens), 2 * len(tokens) + 7
    given = context(exchange=exchange, part=part, max_position=count + 1)
    given = given if kernels is None else replace(given, kernels=kernels)
    target = load_target(folder, given)
    arch: TargetArch = target.arch
    pages = (torch.randperm(slots - 1, generator=torch.Generator().manual_seed(4)) + 1)[None, : count + 1]
    gather = Gather(table_of(pages), 1)
    _, attention = bind_attention(
        [local_heads(g, part) for g in arch.layers], slots, torch.float64, gather, given.kernels
    )
    boundaries = tuple(range(arch.num_layers + 1))
    logits, streams, at = [], [], 0
    for rows in chunks:
        attention.prepare(HostBounds(0, ((at, at + rows),)))
        text = PromptRows(torch.tensor([0]), torch.tensor([at]), torch.tensor([0, rows]))
        attention.bind(AttentionMetadata(pages[0, at : at + rows], None, text))
        ids, positions = torch.tensor(tokens[at : at + rows]), torch.arange(at, at + rows)
        hidden, aux = target.forward(ids, positions, attention, boundaries)
        columns = target.logits(hidden)
        logits.append(exchange.logits(columns) if isinstance(exchange, Summed) else columns.values)
        streams.append(aux)
        at += rows
    assert at == count
    if isinstance(exchange, Summed):
        forward, head, *_ = target.exchange_calls
        assert exchange.ops == [*forward, *head] * len(chunks), "the ops that a target declares are those it calls"
    return torch.cat(logits), [torch.cat(parts) for parts in zip(*streams, strict=True)]
