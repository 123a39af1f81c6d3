"""A model's shards in one process: a thread per rank, and an exchange that sums the ranks' rows in rank order."""

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
from cluster.engine.backends import PoolKind, bind_layers
from cluster.kernels.interface import Kernels
from cluster.models.exchange import NoExchange, TokenExchange
from cluster.models.load import local_heads
from cluster.models.vocab import ShardedLogits
from tests.support.loading import context, load_target
from tests.support.page_tables import table_of

T = TypeVar("T")
CPU = torch.device("cpu")


class SummingExchange:
    """The exchange of rank `rank`. All ranks share `table` and `barrier`. `ops` records the calls.

    Tests with this exchange choose no tokens, so `shards` is None: the shards of a head exchange nothing.
    """

    shards = None

    def __init__(self, rank: int, table: list[Any], barrier: Barrier) -> None:
        self._rank, self._table, self._barrier = rank, table, barrier
        self.ops: list[str] = []

    def _gather_rows(self, rows: Tensor) -> list[Tensor]:
        self._table[self._rank] = rows
        self._barrier.wait(60)
        all_rows = list(self._table)
        self._barrier.wait(60)
        return all_rows

    def _sum(self, op: str, rows: Tensor) -> Tensor:
        self.ops.append(op)
        return torch.stack(self._gather_rows(rows)).sum(0)

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
        """Return the logits of all columns, `[T, V]`, from the ranks' `columns`."""
        return torch.cat(self._gather_rows(columns.values), -1)[:, : columns.vocab]


def run_on_shards(size: int, run: Callable[[Shard, SummingExchange], T]) -> list[T]:
    """Call `run` in one thread for each of `size` ranks; return the results in rank order."""
    table: list[Any] = [None] * size
    barrier = Barrier(size)

    def run_rank(rank: int) -> T:
        try:
            return run(Shard(rank, size), SummingExchange(rank, table, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run_rank, range(size)))


def run_text(
    folder: str, tokens: list[int], chunks: list[int], size: int, kernels: Kernels | None = None
) -> list[tuple[Tensor, list[Tensor]]]:
    """Run the target in `folder` over `tokens`; return logits `[T, V]` and all boundaries for each of `size` ranks.

    The text runs in chunks of `chunks` tokens, over scattered pages. `kernels` None: this machine's default kernels.
    """
    local_exchange = NoExchange() if size == 1 else None
    return run_on_shards(
        size,
        lambda shard, shared_exchange: _run(folder, tokens, chunks, shard, local_exchange or shared_exchange, kernels),
    )


@torch.inference_mode()
def _run(
    folder: str, tokens: list[int], chunks: list[int], shard: Shard, exchange: TokenExchange, kernels: Kernels | None
) -> tuple[Tensor, list[Tensor]]:
    count, slots = len(tokens), 2 * len(tokens) + 7
    load_context = context(exchange=exchange, shard=shard, max_position=count + 1)
    load_context = load_context if kernels is None else replace(load_context, kernels=kernels)
    target = load_target(folder, load_context)
    arch: TargetArch = target.arch
    pages = (torch.randperm(slots - 1, generator=torch.Generator().manual_seed(4)) + 1)[None, : count + 1]
    table = table_of(pages)
    kind = PoolKind(slots, Gather(table, 1), table)
    layers = [local_heads(g, shard) for g in arch.layers]
    _, attention = bind_layers(layers, [kind], [False] * len(layers), load_context.kernels, (torch.float64, False))
    boundaries = tuple(range(arch.num_layers + 1))
    logits, streams, start = [], [], 0
    for rows in chunks:
        attention.prepare(HostBounds(0, ((start, start + rows),)))
        prompt_rows = PromptRows(torch.tensor([0]), torch.tensor([start]), torch.tensor([0, rows]))
        attention.bind(AttentionMetadata(pages[0, start : start + rows], None, prompt_rows))
        ids, positions = torch.tensor(tokens[start : start + rows]), torch.arange(start, start + rows)
        hidden, aux = target.forward(ids, positions, attention, boundaries)
        columns = target.logits(hidden)
        logits.append(exchange.logits(columns) if isinstance(exchange, SummingExchange) else columns.values)
        streams.append(aux)
        start += rows
    assert start == count
    if isinstance(exchange, SummingExchange):
        forward, head, *_ = target.exchange_calls
        assert exchange.ops == [*forward, *head] * len(chunks), "a target must call the ops that it declares"
    return torch.cat(logits), [torch.cat(parts) for parts in zip(*streams, strict=True)]
