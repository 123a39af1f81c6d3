"""Calls of kernels to measure: attention over a KV cache, and two contenders that take turns."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.arch.layer import LayerGeometry
from cluster.attention.ancestor_bits import line_bits
from cluster.attention.gather import Gather
from cluster.batch import AttentionMetadata, HostBounds, PromptRows, TreeRows
from cluster.bench.ceilings import timed
from cluster.bench.report import median, ratio
from cluster.engine.backends import bind_attention
from cluster.kernels.interface import Kernels
from cluster.kv.codes import coded
from cluster.kv.page_table import PageTable
from cluster.kv.pool import pool_bytes

CPU = torch.device("cpu")
PAGE = 16
LAYER = LayerGeometry(2048, 32, 8, 64, 8192, 1e-5)  # a layer of a model with a billion parameters
SMALL_LAYER = LayerGeometry(256, 4, 2, 64, 512, 1e-5)
LOADS = (("decode", 1, 1), ("decode", 8, 1), ("chain", 8, 4), ("tree", 4, 16), ("prompt", 1, 256))
"""Calls of attention: name, requests, rows of each request."""


class KernelCase(NamedTuple):
    """One call of a kernel on some rows. `read`: bytes that the call must read. `computed`: its floating-point
    operations.
    """

    kernel: str
    rows: str
    run: Callable[[], object]
    read: float
    computed: float


class Compared(NamedTuple):
    """Seconds of one call of each contender, and how many times as fast the first one is: medians over the turns."""

    seconds: float
    other_seconds: float
    times: float


def compare(own: Callable[[], object], other: Callable[[], object], repeats: int) -> Compared:
    """Call both contenders alternately, in `repeats` turns of some milliseconds, after one call each as a warm-up."""
    own(), other()
    calls = max(1, min(200, int(0.005 / max(1e-6, timed(own), timed(other)))))
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats):
        for which in (0, 1) if turn % 2 else (1, 0):
            seconds[which].append(timed(partial(_repeated, (own, other)[which], calls)) / calls)
    times = median([ratio(b, a) for a, b in zip(*seconds, strict=True)])
    return Compared(median(seconds[0]), median(seconds[1]), times)


def _repeated(run: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        run()


def attention_cases(
    g: LayerGeometry, prefix: int, kernels: Kernels, dtype: torch.dtype, fp8: bool = False
) -> Iterator[KernelCase]:
    """Yield a case for each of `LOADS`, over prefixes of `prefix` tokens. The cache is in FP8 if `fp8`, otherwise in
    `dtype`. The random rows are the same for any `kernels` and cache.
    """
    dice = torch.Generator().manual_seed(3)
    for name, requests, rows in LOADS:
        table = PageTable(requests, prefix + rows, PAGE, CPU)
        pages = table.device_pages.shape[1]
        order = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(1)).to(torch.int32)
        table.device_pages[:requests] = order.view(requests, pages) + 1  # scattered pages; no request gets page 0
        slots = (requests * pages + 1) * PAGE
        pool, attention = bind_attention([g], slots, dtype, Gather(table, rows), kernels, fp8)
        held = torch.randn(slots, *g.cell, generator=torch.Generator().manual_seed(2)).to(dtype)
        pool.kv[0] = held if pool.coded is None else coded(held, pool.coded)
        number, lens = torch.arange(requests), torch.full((requests,), prefix)
        write = table.slots(number[:, None], prefix + torch.arange(rows)).flatten()
        tree = text = None
        if name == "prompt":
            text = PromptRows(number, lens, torch.tensor([0, rows]))
        else:
            tree = TreeRows(number, lens, line_bits(rows, rows, CPU), rows)
        q = torch.randn(requests * rows, g.heads, g.head_dim, generator=dice).to(dtype)
        kv = torch.randn(requests * rows, *g.cell, generator=dice).to(dtype)
        metadata = AttentionMetadata(write, tree, text)
        bounds = HostBounds(prefix, ((prefix, prefix + rows),) if text else ())
        run = partial(_attend, attention, q, kv, metadata, bounds)
        read = requests * (prefix + rows) * pool_bytes([g], dtype, fp8)
        computed = 4 * requests * rows * (prefix + rows / 2) * g.heads * g.head_dim
        yield KernelCase(f"attend, {name}", f"{requests} x {rows} rows", run, read, computed)


def _attend(attention: Any, q: Tensor, kv: Tensor, metadata: AttentionMetadata, bounds: HostBounds) -> None:
    attention.prepare(bounds)
    attention.bind(metadata)
    attention(0, q, kv)
