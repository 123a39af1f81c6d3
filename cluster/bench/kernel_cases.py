"""Prepare calls of attention over a KV cache for measurements, and compare the times of two calls in turns."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.arch.layer import LayerGeometry
from cluster.attention.ancestor_bits import chain_bits
from cluster.attention.gather import Gather
from cluster.batch import AttentionMetadata, HostBounds, PromptRows, TreeRows
from cluster.bench.ceilings import call_seconds
from cluster.bench.report import median, ratio
from cluster.engine.backends import PoolKind, bind_attention
from cluster.kernels.interface import Kernels
from cluster.kv.codes import encode
from cluster.kv.page_table import PageTable
from cluster.kv.pool import pool_bytes

CPU = torch.device("cpu")
PAGE_SIZE = 16
LAYER = LayerGeometry(2048, 32, 8, 64, 8192, 1e-5)  # a layer of a model with a billion parameters
SMALL_LAYER = LayerGeometry(256, 4, 2, 64, 512, 1e-5)
ATTENTION_LOADS = (("decode", 1, 1), ("decode", 8, 1), ("chain", 8, 4), ("tree", 4, 16), ("prompt", 1, 256))
"""Calls of attention: name, requests, rows of each request. The rows of the case `tree` form a chain."""


class KernelCase(NamedTuple):
    """A kernel's call, `run`, on some rows. `kernel` and `rows` name the call in reports. The call must read
    `bytes_read` bytes and do `operations` floating-point operations.
    """

    kernel: str
    rows: str
    run: Callable[[], object]
    bytes_read: float
    operations: float


class Comparison(NamedTuple):
    """Medians over the turns: the seconds of one call of the candidate and of the baseline, and the `speedup` of the
    candidate over the baseline.
    """

    seconds: float
    baseline_seconds: float
    speedup: float


def compare_calls(candidate: Callable[[], object], baseline: Callable[[], object], repeats: int) -> Comparison:
    """Measure both calls alternately in `repeats` turns of about 5 ms, at least one call each, after a warm-up."""
    candidate(), baseline()
    calls = max(1, min(200, int(0.005 / max(1e-6, call_seconds(candidate), call_seconds(baseline)))))
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats):
        for contender in (0, 1) if repeat % 2 else (1, 0):
            seconds[contender].append(
                call_seconds(partial(_call_repeatedly, (candidate, baseline)[contender], calls)) / calls
            )
    speedup = median([ratio(b, a) for a, b in zip(*seconds, strict=True)])
    return Comparison(median(seconds[0]), median(seconds[1]), speedup)


def _call_repeatedly(call: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        call()


def attention_cases(
    g: LayerGeometry, prefix: int, kernels: Kernels, dtype: torch.dtype, fp8: bool = False
) -> Iterator[KernelCase]:
    """Yield a case for each of `ATTENTION_LOADS`, over prefixes of `prefix` tokens. The cache is in FP8 if `fp8`,
    otherwise in `dtype`. The random numbers are the same for any `kernels`, and with or without FP8.
    """
    generator = torch.Generator().manual_seed(3)
    for name, requests, rows in ATTENTION_LOADS:
        table = PageTable(requests, prefix + rows, PAGE_SIZE, CPU)
        pages = table.device_pages.shape[1]
        page_order = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(1)).to(torch.int32)
        table.device_pages[:requests] = page_order.view(requests, pages) + 1  # scattered pages; page 0 is reserved
        slots = (requests * pages + 1) * PAGE_SIZE
        pool, attention = bind_attention([g], PoolKind(slots, Gather(table, rows), table), dtype, fp8, kernels)
        cells = torch.randn(slots, *g.cell.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        pool.kv[0] = encode(cells, g.cell) if fp8 else cells
        request_rows, prefix_lens = torch.arange(requests), torch.full((requests,), prefix)
        write_slots = table.slots(request_rows[:, None], prefix + torch.arange(rows)).flatten()
        tree_rows = prompt_rows = None
        if name == "prompt":
            prompt_rows = PromptRows(request_rows, prefix_lens, torch.tensor([0, rows]))
        else:
            tree_rows = TreeRows(request_rows, prefix_lens, chain_bits(rows, rows, CPU), rows)
        q = torch.randn(requests * rows, g.heads, g.head_dim, generator=generator).to(dtype)
        kv = torch.randn(requests * rows, *g.cell.shape, generator=generator).to(dtype)
        metadata = AttentionMetadata(write_slots, tree_rows, prompt_rows)
        bounds = HostBounds(prefix, ((prefix, prefix + rows),) if prompt_rows else ())
        call = partial(_run_attention, attention, q, kv, metadata, bounds)
        bytes_read = requests * (prefix + rows) * pool_bytes([g], dtype, fp8)
        operations = 4 * requests * rows * (prefix + rows / 2) * g.heads * g.head_dim
        yield KernelCase(f"attend, {name}", f"{requests} x {rows} rows", call, bytes_read, operations)


def _run_attention(attention: Any, q: Tensor, kv: Tensor, metadata: AttentionMetadata, bounds: HostBounds) -> None:
    attention.prepare(bounds)
    attention.bind(metadata)
    attention(0, q, kv)
