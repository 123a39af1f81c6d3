"""A reference of attention, one softmax per row in plain exponentials, and cases of requests to run attention on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cluster.arch.cell import Cell
from cluster.attention.ancestor_bits import pack_bits
from cluster.attention.gather import Gather
from cluster.attention.shape import AttentionShape
from cluster.attention.torch_backend import TorchAttention
from cluster.batch import AttentionMetadata, HostBounds, PromptRows, TreeRows
from cluster.kv.codes import encode
from cluster.kv.page_table import PageTable, WindowTable
from cluster.kv.pool import KVPool
from cluster.kv.window_map import WindowMap
from cluster.models.runner import AttentionBackend
from tests.unit.attention.fp8 import cached_values

CPU = torch.device("cpu")
LATENT_VALUES = 5  # the width of the value in a latent cell, unless a case says otherwise


def softmax_row(q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """Return one row's attention output `[nh * dv]`, from q `[nh, d]`, k `[L, nkv, d]` and v `[L, nkv, dv]`."""
    k, v = (part.repeat_interleave(q.shape[0] // part.shape[1], 1) for part in (k, v))
    weights = (scale * (k * q).sum(-1)).exp()
    totals = weights.sum(0) + (0 if sinks is None else sinks.exp())
    return ((weights[..., None] * v).sum(0) / totals[:, None]).flatten()


def keys_values(cells: Tensor, cell: Cell) -> tuple[Tensor, Tensor]:
    """Return the keys `[L, nkv, d]` and values `[L, nkv, dv]` of `cells` `[L, *cell.shape]`."""
    numbers = cells.flatten(1)
    if cell.is_latent:
        return numbers[:, None], numbers[:, None, : cell.value_dim]
    keys, values = numbers.split([cell.kv_heads * cell.key_dim, cell.kv_heads * cell.value_dim], 1)
    return keys.reshape(len(cells), cell.kv_heads, -1), values.reshape(len(cells), cell.kv_heads, -1)


@dataclass
class Case:
    """One attention step: its requests, their pages, queries and KV cells.

    First come tree requests with `committed` tokens each. Every tree request has one tree row per entry of `parents`,
    the node's parent (-1: none). Then come prompt requests with a chunk of positions (start, stop) each, in order of
    length. Each request has its own row of the page table.

    `lies` is the layout of a request's pages. "run": consecutive pages. "tail": the later half of the pages alternates
    with the pages of other requests. "scattered": pages in random order.

    `sunk`: there are attention sinks. `window`: the sliding window of the layer, or with `chunked` the size of its
    chunks. `window_pool`: the cells are in a window pool, without those that no row sees. `first`: as in
    `AttentionMetadata`. `d`, `values`: widths of keys and of values, by default the same. `latent`: cells of latent
    attention. `fp8`: the cache is in FP8, and the expected output uses the rounded values in the cache. `single_rows`:
    attention gets each tree row as a request with one row, as if nodes had been selected (`spec/row_budget.py`).
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
    chunked: bool = False
    window_pool: bool = False
    first: int = 0
    dtype: torch.dtype = torch.float64
    seed: int = 0
    d: int = 8
    fp8: bool = False
    single_rows: bool = False
    values: int | None = None
    cell: Cell = field(init=False)
    slots: list[list[int]] = field(init=False)
    """The slot of each position of each request."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        requests, n = len(self.committed) + len(self.chunks), len(self.parents)
        longest = max([*(count + n for count in self.committed), *(stop for _, stop in self.chunks), 1])
        pages_per_request = -(-longest // self.page_size)
        count = requests * pages_per_request + 1
        table = PageTable(requests, pages_per_request * self.page_size, self.page_size, CPU)
        order = torch.randperm(count - 1, generator=generator) if self.lies == "scattered" else torch.arange(count - 1)
        pages = (order + 1).view(requests, pages_per_request)
        if self.lies == "tail":
            pages[:, pages_per_request // 2 :] = (
                pages[:, pages_per_request // 2 :].reshape(-1).sort().values.view(-1, requests).t()
            )
        table.device_pages[:requests] = pages
        self.slots = table.first_slots(torch.arange(requests), longest).tolist()
        self.table = table
        values = self.values or (LATENT_VALUES if self.latent else self.d)
        self.cell = Cell(1 if self.latent else self.kv_heads, self.d, values, self.latent)
        pool = KVPool(2, count * self.page_size, self.cell, self.dtype, CPU)
        pool.kv.fill_(torch.nan)  # a read of an unwritten cell gives NaN
        for row, length in enumerate([*self.committed, *(start for start, _ in self.chunks)]):
            slots = table.first_slots(torch.tensor([row]), length)[0].long()
            cells = torch.randn(length, *self.cell.shape, generator=generator, dtype=self.dtype)
            pool.kv[1, slots] = self.cached_cells(cells)
        self.pool, rows = pool, len(self.committed) * n + sum(stop - start for start, stop in self.chunks)
        self.q = torch.randn(rows, self.heads, self.d, generator=generator, dtype=self.dtype)
        self.kv = torch.randn(rows, *self.cell.shape, generator=generator, dtype=self.dtype)
        self.sinks = torch.randn(self.heads, generator=generator, dtype=self.dtype) if self.sunk else None
        ancestors = torch.eye(n, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                ancestors[node] |= ancestors[parent]
        self.ancestors = ancestors

    def cached_cells(self, kv: Tensor) -> Tensor:
        """Return the values that the cache has after writing the cells `kv`: rounded if the cache is in FP8."""
        return cached_values(kv, self.cell).to(kv.dtype) if self.fp8 else kv

    def visible_cells(self) -> list[list[tuple[int, int]]]:
        """Return for each row the (table row, position) of all cells that it can see without a sliding window.

        A row's own cell is the last.
        """
        ancestor_lists = [ancestors.nonzero()[:, 0].tolist() for ancestors in self.ancestors]
        rows = [
            [(i, at) for at in range(count)] + [(i, count + j) for j in ancestors]
            for i, count in enumerate(self.committed)
            for ancestors in ancestor_lists
        ]
        for i, (start, stop) in enumerate(self.chunks, start=len(self.committed)):
            rows += [[(i, position) for position in range(at + 1)] for at in range(start, stop)]
        return rows

    def write(self) -> Tensor:
        """Return the slots that the rows write: the tree rows of each request in order of nodes, then the chunks."""
        n = len(self.parents)
        slots = [self.slots[i][count + j] for i, count in enumerate(self.committed) for j in range(n)]
        for i, (start, stop) in enumerate(self.chunks, start=len(self.committed)):
            slots += [self.slots[i][at] for at in range(start, stop)]
        return torch.tensor(slots, dtype=torch.int64)

    def expected(self) -> Tensor:
        """Return the output of all rows from the definition, in float64. Rows at positions below `first` are zero, as
        the definition gives no output for them.
        """
        cache, out = self.pool.kv[1].double(), []
        cache[self.write()] = self.cached_cells(self.kv).double()
        q, sinks = self.q.double(), None if self.sinks is None else self.sinks.double()
        for row, visible in enumerate(self.visible_cells()):
            row_position = len(visible) - 1  # a row can see one cell for each position up to its own
            first_visible = max(self._first_visible(row_position), self.first)
            cells = cache[torch.tensor([self.slots[i][at] for i, at in visible[first_visible:]], dtype=torch.int64)]
            if row_position < self.first:
                out.append(torch.zeros(self.heads * self.cell.value_dim, dtype=torch.float64))
                continue
            out.append(softmax_row(q[row], *keys_values(cells, self.cell), 0.3, sinks))
        return torch.stack(out) if out else torch.zeros(0, self.heads * self.cell.value_dim, dtype=torch.float64)

    def _first_visible(self, row_position: int) -> int:
        """Return the first position that a row sees by the definition of the layer, without `first`."""
        if self.window is None:
            return 0
        return row_position // self.window * self.window if self.chunked else row_position - self.window + 1

    @property
    def visible_span(self) -> int | None:
        """The window as `AttentionShape` has it: negative if it is the size of a chunk."""
        return -self.window if self.chunked and self.window is not None else self.window

    def attention_metadata(self) -> AttentionMetadata:
        requests, n, lengths = len(self.committed), len(self.parents), [stop - start for start, stop in self.chunks]
        lens = torch.tensor(self.committed, dtype=torch.int64)
        rows, bits = torch.arange(requests), pack_bits(self.ancestors[None])
        tree = TreeRows(rows, lens, bits, n)
        if self.single_rows:
            single_bits = bits.expand(requests, -1, -1).reshape(requests * n, 1, -1)
            tree = TreeRows(rows.repeat_interleave(n), lens.repeat_interleave(n), single_bits, n)
        prompt_rows = PromptRows(
            torch.arange(requests, requests + len(lengths)),
            torch.tensor([start for start, _ in self.chunks], dtype=torch.int64),
            torch.tensor([0, *lengths]).cumsum(0),
        )
        return AttentionMetadata(self.write(), tree if requests else None, prompt_rows if lengths else None, self.first)

    def window_map(self) -> WindowMap:
        """Return a map with a window page for each page that holds a position which a row sees."""
        assert self.window is not None, "only a layer with a sliding window is in a window pool"
        window_map = WindowMap(self.pool.slots // self.page_size - 1, self.page_size, CPU)
        pages: list[int] = []
        starts = [*self.committed, *(start for start, _ in self.chunks)]
        for row, start in enumerate(starts):
            pages += self.table.device_pages[row, max(0, start - self.window + 1) // self.page_size :].tolist()
        order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(self.seed)) + 1
        window_map.apply(torch.stack([torch.tensor(pages), order]))
        return window_map

    def filled_pool(self, window_map: WindowMap | None = None) -> KVPool:
        """Return a pool with the committed cells, a window pool if `window_map` is given. All unwritten cells are NaN,
        in FP8 too, but those of the sink page of a window pool are zeros.
        """
        slots, cells = self.pool.slots, self.pool.kv
        if window_map is not None:
            pages = window_map.device_pages.argsort()[-int(window_map.device_pages.count_nonzero()) :]
            size = self.page_size
            kept = (pages[:, None] * size + torch.arange(size)).view(-1)
            cells = torch.cat([torch.zeros_like(cells[:, :size]), cells[:, kept]], 1)
            slots = cells.shape[1]
        pool = KVPool(2, slots, self.cell, self.dtype, CPU, self.fp8, window_map)
        if not self.fp8:
            pool.kv.copy_(cells)
            return pool
        for layer, layer_values in zip(pool.kv, cells, strict=True):
            written = layer_values.isfinite().flatten(1).all(1)[:, None]
            layer.copy_(torch.where(written, encode(layer_values.nan_to_num(), self.cell), 255))
        return pool

    def backend_output(self, extra_bound: int = 0, make: Callable[..., AttentionBackend] | None = None) -> Tensor:
        """Run a backend on this case and return its output: the torch backend, or the backend that `make` returns.

        The backend is prepared for a longest request that is `extra_bound` longer than the case's. All output must be
        finite. Rows at positions below `first` are set to zero.
        """
        window_map = self.window_map() if self.window_pool else None
        pool = self.filled_pool(window_map)
        table = self.table if window_map is None else WindowTable(self.table, window_map)
        gather = Gather(table, len(self.parents))
        shape = AttentionShape(self.heads, (None, self.visible_span), 0.3)
        attention: AttentionBackend = TorchAttention(pool, gather, shape)
        if make is not None:
            attention = make(pool, self.table, shape)
        attention.prepare(HostBounds(max(self.committed, default=0) + extra_bound, tuple(self.chunks)))
        attention.bind(self.attention_metadata())
        out = attention(1, self.q, self.kv, self.sinks)
        assert out.isfinite().all()
        hidden_rows = [row for row, visible in enumerate(self.visible_cells()) if len(visible) - 1 < self.first]
        return out.index_fill(0, torch.tensor(hidden_rows, dtype=torch.int64), 0)
