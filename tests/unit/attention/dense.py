"""What attention must give, one softmax per row in plain exponentials, and requests to try it on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cluster.arch.cell import CodedCell
from cluster.attention.ancestor_bits import pack_bits
from cluster.attention.gather import Gather
from cluster.attention.shape import AttentionShape
from cluster.attention.torch_backend import TorchAttention
from cluster.batch import AttentionMetadata, HostBounds, PromptRows, TreeRows
from cluster.kv.codes import encode
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool
from cluster.models.runner import AttentionBackend
from tests.unit.attention.fp8 import held

CPU = torch.device("cpu")


def softmax_row(q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """q `[nh, d]`, k `[L, nkv, d]`, v `[L, nkv, dv]` -> `[nh * dv]`."""
    out, repeat = [], q.shape[0] // k.shape[1]
    for head in range(q.shape[0]):
        weights = (scale * (k[:, head // repeat] @ q[head])).exp()
        total = weights.sum() + (0 if sinks is None else sinks[head].exp())
        out.append((weights[:, None] * v[:, head // repeat]).sum(0) / total)
    return torch.cat(out)


@dataclass
class Case:
    """Requests with `committed` tokens and a window row for each parent in `parents` (-1: none), then prompt chunks
    `(start, stop)`, in order of length; each request in a table row of its own.

    With `fp8` the cache is in FP8: what the definition says is then said of the numbers that it holds.

    Its pages lie in a `run`, or the later half of them takes turns with others' (`tail`), or they are `scattered`.
    """

    heads: int
    kv_heads: int
    committed: Sequence[int]
    parents: Sequence[int]
    chunks: Sequence[tuple[int, int]]
    page_size: int
    lies: str
    latent: bool = False
    sunk: bool = False
    window: int | None = None
    first: int = 0
    dtype: torch.dtype = torch.float64
    seed: int = 0
    d: int = 8
    fp8: bool = False
    values: int = field(init=False)

    def __post_init__(self) -> None:
        dice = torch.Generator().manual_seed(self.seed)
        requests, n = len(self.committed) + len(self.chunks), len(self.parents)
        longest = max([*(count + n for count in self.committed), *(stop for _, stop in self.chunks), 1])
        each = -(-longest // self.page_size)
        count = requests * each + 1
        table = PageTable(requests, each * self.page_size, self.page_size, CPU)
        order = torch.randperm(count - 1, generator=dice) if self.lies == "scattered" else torch.arange(count - 1)
        pages = (order + 1).view(requests, each)
        if self.lies == "tail":
            pages[:, each // 2 :] = pages[:, each // 2 :].reshape(-1).sort().values.view(-1, requests).t()
        table.device_pages[:requests] = pages
        self.table, self.values = table, 5 if self.latent else self.d
        parts, kv_heads = (1, 1) if self.latent else (2, self.kv_heads)
        pool = KVPool(2, count * self.page_size, (parts, kv_heads, self.d), self.dtype, CPU)
        pool.kv.fill_(torch.nan)  # what nobody wrote must not be read
        for row, known in enumerate([*self.committed, *(start for start, _ in self.chunks)]):
            slots = table.first_slots(torch.tensor([row]), known)[0].long()
            cells = torch.randn(known, parts, kv_heads, self.d, generator=dice, dtype=self.dtype)
            pool.kv[1, slots] = self.kept(cells)
        self.pool, rows = pool, len(self.committed) * n + sum(stop - start for start, stop in self.chunks)
        self.q = torch.randn(rows, self.heads, self.d, generator=dice, dtype=self.dtype)
        self.kv = torch.randn(rows, parts, kv_heads, self.d, generator=dice, dtype=self.dtype)
        self.sinks = torch.randn(self.heads, generator=dice, dtype=self.dtype) if self.sunk else None
        seen = torch.eye(n, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        self.ancestors = seen

    def kept(self, kv: Tensor) -> Tensor:
        """What the cache holds of cells."""
        return held(kv, self.values if self.latent else None).to(kv.dtype) if self.fp8 else kv

    def texts(self) -> list[list[tuple[int, int]]]:
        """Of each row (table row, position) of all it may see, itself last, without regard to windows."""
        above = [seen.nonzero()[:, 0].tolist() for seen in self.ancestors]
        rows = [
            [(i, at) for at in range(count)] + [(i, count + j) for j in seen]
            for i, count in enumerate(self.committed)
            for seen in above
        ]
        for i, (start, stop) in enumerate(self.chunks, start=len(self.committed)):
            rows += [[(i, position) for position in range(at + 1)] for at in range(start, stop)]
        return rows

    def slot(self, row: int, position: int) -> int:
        return int(self.table.slots(torch.tensor(row), torch.tensor(position)))

    def write(self) -> Tensor:
        """The slots of the new rows: window rows lie in order of the tree's nodes."""
        n = len(self.parents)
        slots = [self.slot(i, count + j) for i, count in enumerate(self.committed) for j in range(n)]
        for i, (start, stop) in enumerate(self.chunks, start=len(self.committed)):
            slots += [self.slot(i, at) for at in range(start, stop)]
        return torch.tensor(slots, dtype=torch.int64)

    def expected(self) -> Tensor:
        """From the definition, in float64. Rows below `first` are zeros: nothing is said of them."""
        memory, out = self.pool.kv[1].double(), []
        memory[self.write()] = self.kept(self.kv).double()
        q, sinks = self.q.double(), None if self.sinks is None else self.sinks.double()
        for row, text in enumerate(self.texts()):
            label = len(text) - 1  # of the row: it sees one cell for each position up to its own
            low = max(0 if self.window is None else label - self.window + 1, self.first)
            cells = memory[torch.tensor([self.slot(*at) for at in text[low:]], dtype=torch.int64)]
            if label < self.first:
                out.append(torch.zeros(self.heads * self.values, dtype=torch.float64))
                continue
            out.append(softmax_row(q[row], cells[:, 0], cells[:, -1, :, : self.values], 0.3, sinks))
        return torch.stack(out) if out else torch.zeros(0, self.heads * self.values, dtype=torch.float64)

    def seen(self) -> AttentionMetadata:
        requests, n, lengths = len(self.committed), len(self.parents), [stop - start for start, stop in self.chunks]
        lens = torch.tensor(self.committed, dtype=torch.int64)
        tree = TreeRows(torch.arange(requests), lens, pack_bits(self.ancestors[None]), n)
        text = PromptRows(
            torch.arange(requests, requests + len(lengths)),
            torch.tensor([start for start, _ in self.chunks], dtype=torch.int64),
            torch.tensor([0, *lengths]).cumsum(0),
        )
        return AttentionMetadata(self.write(), tree if requests else None, text if lengths else None, self.first)

    def filled(self) -> KVPool:
        """A pool with the committed cells; in FP8, what nobody wrote is not a number either."""
        given = 2, self.pool.slots, self.pool.cell, self.dtype, CPU
        if not self.fp8:
            pool = KVPool(*given)
            pool.kv.copy_(self.pool.kv)
            return pool
        cell = CodedCell(self.pool.cell, self.values if self.latent else None)
        pool = KVPool(*given, cell)
        for layer, numbers in zip(pool.kv, self.pool.kv, strict=True):
            written = numbers.isfinite().flatten(1).all(1)[:, None]
            layer.copy_(torch.where(written, encode(numbers.nan_to_num(), cell), 255))
        return pool

    def given(self, over: int = 0, make: Callable[..., AttentionBackend] | None = None) -> Tensor:
        """What torch's backend gives, or one that is made otherwise, told a bound that is `over` the longest; rows
        below `first` zeroed when finite.
        """
        pool = self.filled()
        gather = Gather(self.table, len(self.parents))
        shape = AttentionShape(self.heads, (None, self.window), 0.3, self.values)
        attention: AttentionBackend = TorchAttention(pool, gather, shape)
        if make is not None:
            attention = make(pool, self.table, shape)
        attention.prepare(HostBounds(max(self.committed, default=0) + over, tuple(self.chunks)))
        attention.bind(self.seen())
        out = attention(1, self.q, self.kv, self.sinks)
        assert out.isfinite().all()
        early = [row for row, text in enumerate(self.texts()) if len(text) - 1 < self.first]
        return out.index_fill(0, torch.tensor(early, dtype=torch.int64), 0)
