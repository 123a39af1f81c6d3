"""Ranks that share a vocabulary, in one process: a thread each, over the real exchange and a made-up axis."""

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
from tests.unit.dp_attention.threads import Meeting, on_ranks
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


class Link(Meeting):
    """An axis of threads. `sent` are the bytes that this rank gave to all others together, as each of them got them."""

    sent = 0

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        self.sent += rows.nbytes if self.size > 1 else 0
        return super().gather(rows, counts)


class Grid(NamedTuple):
    """`dp` groups of `tp` ranks; `wide`: the vocabulary is sharded over all of them, else over each group."""

    tp: int
    dp: int
    wide: bool

    @property
    def shards(self) -> int:
        return self.tp * self.dp if self.wide and self.dp > 1 else self.tp


class Cut(Dense):
    """The weight of a head whose rows are logits already: it cuts out columns from `start` on. Padding is 9, to be seen
    if it is not left out.
    """

    def __init__(self, matrix: Tensor, start: int = 0) -> None:
        super().__init__(matrix)
        self.start = start

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        mine = rows[:, self.start : self.start + self.shape[1]]
        return torch.cat([mine, mine.new_full((rows.shape[0], self.shape[1] - mine.shape[1]), 9.0)], 1)


class Seat(NamedTuple):
    """What one rank has: its group, its exchange, the axis of its vocabulary and its columns of its group's logits."""

    group: int
    exchange: Exchange
    axis: Link
    columns: ShardedLogits


def seated(
    grid: Grid,
    logits: Sequence[Tensor],
    calls: Sequence[tuple[str, int]],
    run: Callable[[Seat], T],
    each: int | None = None,
) -> list[T]:
    """`run` on every rank of `grid`, for the `logits` `[T, V]` of each group; its script has `calls` after the head, of
    `each` rows of every group or else of the rows of the head.
    """
    vocab, rows = logits[0].shape[1], tuple(one.shape[0] for one in logits)
    columns, after = -(-vocab // grid.shards), rows if each is None else (each,) * grid.dp

    def sit(mesh: Mesh) -> T:
        group, exchange = mesh.rank // grid.tp, Exchange(mesh, logits[0].dtype, grid.wide)
        script = [
            ScriptCall("target", "head", rows, vocab, columns),
            *(ScriptCall("target", op, after, n) for op, n in calls),
        ]
        exchange.begin(0, script if exchange.shards is not None else script[:1])
        axis: Any = mesh.world if exchange.over_world else mesh.attn
        start = min(vocab, axis.shard.rank * columns)
        made = Head(Cut(torch.empty(vocab, columns), start), vocab, start)(logits[group], exchange)
        axis.sent = 0
        answer = run(Seat(group, exchange, axis, made))
        exchange.end()
        return answer

    return on_ranks(grid.tp * grid.dp, grid.dp, sit, Link)


@dataclass
class Group:
    """The requests of one attention group: R with a tree of n nodes each, and F whose prompt ends."""

    logits: Tensor
    draws: tuple[SamplingInputs, ...]

    @staticmethod
    def random(vocab: int, nodes: int, dtype: torch.dtype, mode: SamplingMode, dice: random.Random) -> "Group":
        requests, finals, positions = dice.randrange(4), dice.randrange(3), 3
        rows = requests * nodes + finals
        logits = torch.randn(rows, vocab, dtype=torch.float64) * dice.choice((0.2, 2.0, 20.0))
        if dice.random() < 0.4:
            logits = logits.round()
        for row in range(rows):
            if dice.random() < 0.15:
                logits[row, dice.randrange(vocab)] = dice.choice((float("nan"), float("inf"), float("-inf")))
        both = sampling(requests + finals, dtype, mode, dice)
        keys = noise_keys(both.seeds, torch.arange(positions).expand(requests + finals, -1))
        noise = Noise.of(keys, vocabulary_hashes(vocab, CPU), dtype) if SamplingMode.RANDOM in mode else None
        tree = None if noise is None else noise.narrow(slice(0, requests))
        ends = None if noise is None else noise.narrow(slice(requests, None)).at(0)
        which = torch.randint(positions, (requests, nodes))
        draws = (
            SamplingInputs(nodes, both.narrow(0, requests), tree, which),
            SamplingInputs(1, both.narrow(requests, requests + finals), ends),
        )
        return Group(logits.to(dtype), draws)

    def of_shard(self, columns: ShardedLogits) -> list[SamplingInputs]:
        """The same draws with a shard's noise."""
        ids = vocabulary_hashes(columns.values.shape[1], CPU, columns.start)
        return [
            draw if draw.noise is None else replace(draw, noise=Noise(draw.noise.keys, ids, draw.noise.dtype))
            for draw in self.draws
        ]

    def thresholds(self) -> Tensor:
        """Of every row, `[T, 1]`."""
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


def sampling(requests: int, dtype: torch.dtype, mode: SamplingMode, dice: random.Random) -> SamplingBatch:
    """Requests of any kind."""
    kinds = KINDS if SamplingMode.FILTERED in mode else KINDS[:2]
    each = [sampling_of(1, dtype=dtype, **dice.choice(kinds)) for _ in range(requests)]
    blank = sampling_of(0, dtype=dtype)
    names = ("inverse_temperature", "noise_scale", "top_k", "top_p", "min_p")
    columns = [torch.cat([getattr(one, name) for one in (*each, blank)]) for name in names]
    seeds = torch.tensor([dice.getrandbits(60) for _ in range(requests)], dtype=torch.int64)
    return SamplingBatch(*columns, seeds, SamplingMode.RANDOM in mode, SamplingMode.FILTERED in mode)


def head_of(grid: Grid, vocab: int, dtype: torch.dtype) -> ShardedHead:
    bits = 8 * at_least_float32(dtype).itemsize
    return ShardedHead(-(-vocab // grid.shards), bits, grid.wide)
