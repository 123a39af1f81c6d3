"""Ranks that share a vocabulary, in one process: a thread per rank, with the product's exchange over a fake axis."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cluster.batch import SamplingBatch, SamplingMode
from cluster.distributed.mesh import Mesh
from cluster.dp_attention.exchange import Exchange
from cluster.dp_attention.plan import ScriptCall
from cluster.kernels.torch_kernels import Dense
from cluster.models.vocab import Head, ShardedLogits
from cluster.sampling.filters import filter_thresholds
from cluster.sampling.noise import Noise, at_least_float32, noise_keys, vocabulary_hashes
from cluster.sampling.sampling_inputs import SamplingInputs
from cluster.sampling.sharded import ShardedHead
from tests.unit.dp_attention.threads import ThreadAxis, run_on_ranks
from tests.unit.sampling.samplings import sampling_of

T = TypeVar("T")
CPU = torch.device("cpu")
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.2, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.6, "top_k": 9, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 1000, "top_p": 0.999},
)


class CountingAxis(ThreadAxis):
    """An axis of threads. `sent_bytes` are the bytes that this rank sent in gathers, counted once for all receivers."""

    sent_bytes = 0

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        self.sent_bytes += rows.nbytes if self.size > 1 else 0
        return super().gather(rows, counts)


class Grid(NamedTuple):
    """`dp` groups of `tp` ranks. If `wide`, all ranks share the vocabulary, else the ranks of each group."""

    tp: int
    dp: int
    wide: bool

    @property
    def shards(self) -> int:
        return self.tp * self.dp if self.wide and self.dp > 1 else self.tp


class ColumnSlice(Dense):
    """A fake weight of a head. Its input rows are already logits, of which it returns the columns from `start` on.

    Padding columns are 9, so that a sampler which does not leave them out gives a wrong result.
    """

    def __init__(self, matrix: Tensor, start: int = 0) -> None:
        super().__init__(matrix)
        self.start = start

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        mine = rows[:, self.start : self.start + self.shape[1]]
        return torch.cat([mine, mine.new_full((rows.shape[0], self.shape[1] - mine.shape[1]), 9.0)], 1)


class RankContext(NamedTuple):
    """One rank's group, exchange, axis of the vocabulary shards, and columns of its group's logits."""

    group: int
    exchange: Exchange
    axis: CountingAxis
    columns: ShardedLogits


def run_on_grid(
    grid: Grid,
    logits: Sequence[Tensor],
    calls: Sequence[tuple[str, int]],
    run: Callable[[RankContext], T],
    rows_per_group: int | None = None,
) -> list[T]:
    """Call `run` on every rank of `grid` and return the results in rank order. `logits` has `[T, V]` for each group.

    The exchange script of a rank has the head, then `calls`. A call has `rows_per_group` rows of every group; None: as
    many rows as the head.
    """
    vocab, rows = logits[0].shape[1], tuple(group_logits.shape[0] for group_logits in logits)
    columns, call_rows = -(-vocab // grid.shards), rows if rows_per_group is None else (rows_per_group,) * grid.dp

    def run_rank(mesh: Mesh) -> T:
        group, exchange = mesh.rank // grid.tp, Exchange(mesh, logits[0].dtype, grid.wide)
        script = [
            ScriptCall("target", "head", rows, vocab, columns),
            *(ScriptCall("target", op, call_rows, n) for op, n in calls),
        ]
        exchange.begin(0, script if exchange.shards is not None else script[:1])
        axis: Any = mesh.world if exchange.over_world else mesh.attn
        start = min(vocab, axis.shard.rank * columns)
        local_logits = Head(ColumnSlice(torch.empty(vocab, columns), start), vocab, start)(logits[group], exchange)
        axis.sent_bytes = 0
        result = run(RankContext(group, exchange, axis, local_logits))
        exchange.end()
        return result

    return run_on_ranks(grid.tp * grid.dp, grid.dp, run_rank, CountingAxis)


@dataclass
class Group:
    """The requests of one attention group: R requests with a tree of n nodes each, and F requests whose prompt ends."""

    logits: Tensor
    draws: tuple[SamplingInputs, ...]

    @staticmethod
    def random(vocab: int, nodes: int, dtype: torch.dtype, mode: SamplingMode, rng: random.Random) -> "Group":
        requests, final_count, positions = rng.randrange(4), rng.randrange(3), 3
        rows = requests * nodes + final_count
        logits = torch.randn(rows, vocab, dtype=torch.float64) * rng.choice((0.2, 2.0, 20.0))
        if rng.random() < 0.4:
            logits = logits.round()
        for row in range(rows):
            if rng.random() < 0.15:
                logits[row, rng.randrange(vocab)] = rng.choice((float("nan"), float("inf"), float("-inf")))
        batch = sampling(requests + final_count, dtype, mode, rng)
        keys = noise_keys(batch.seeds, torch.arange(positions).expand(requests + final_count, -1))
        noise = Noise.of(keys, vocabulary_hashes(vocab, CPU), dtype) if SamplingMode.RANDOM in mode else None
        tree_noise = None if noise is None else noise.narrow(slice(0, requests))
        final_noise = None if noise is None else noise.narrow(slice(requests, None)).at(0)
        noise_index = torch.randint(positions, (requests, nodes))
        draws = (
            SamplingInputs(nodes, batch.narrow(0, requests), tree_noise, noise_index),
            SamplingInputs(1, batch.narrow(requests, requests + final_count), final_noise),
        )
        return Group(logits.to(dtype), draws)

    def of_shard(self, columns: ShardedLogits) -> list[SamplingInputs]:
        """Return the group's sampling inputs with the noise of one shard's columns."""
        ids = vocabulary_hashes(columns.values.shape[1], CPU, columns.start)
        return [
            draw if draw.noise is None else replace(draw, noise=Noise(draw.noise.keys, ids, draw.noise.dtype))
            for draw in self.draws
        ]

    def thresholds(self) -> Tensor:
        """Return the filter threshold of every row, `[T, 1]`."""
        parts, start = [], 0
        for draw in self.draws:
            r, n = draw.requests, draw.rows_per_request
            rows = (
                self.logits[start : start + r * n]
                .view(r, n, self.logits.shape[1])
                .to(draw.sampling.inverse_temperature.dtype)
            )
            parts.append(
                filter_thresholds(rows * draw.sampling.inverse_temperature[:, None, None], draw.sampling).view(-1, 1)
            )
            start += r * n
        return torch.cat(parts)


def sampling(requests: int, dtype: torch.dtype, mode: SamplingMode, rng: random.Random) -> SamplingBatch:
    """Return the sampling batch of requests whose parameters are drawn from `KINDS`."""
    kinds = KINDS if SamplingMode.FILTERED in mode else KINDS[:2]
    batches = [sampling_of(1, dtype=dtype, **rng.choice(kinds)) for _ in range(requests)]
    empty_batch = sampling_of(0, dtype=dtype)
    names = ("inverse_temperature", "noise_scale", "top_k", "top_p", "min_p")
    columns = [torch.cat([getattr(batch, name) for batch in (*batches, empty_batch)]) for name in names]
    seeds = torch.tensor([rng.getrandbits(60) for _ in range(requests)], dtype=torch.int64)
    return SamplingBatch(*columns, seeds, SamplingMode.RANDOM in mode, SamplingMode.FILTERED in mode)


def head_of(grid: Grid, vocab: int, dtype: torch.dtype) -> ShardedHead:
    bits = 8 * at_least_float32(dtype).itemsize
    return ShardedHead(-(-vocab // grid.shards), bits, grid.wide)
