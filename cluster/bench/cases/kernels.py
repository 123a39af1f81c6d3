"""`aerie bench kernels`: each kernel that serves on this CPU against its reference implementation in torch, alternately
in one run, and against the machine's ceilings.

The possible time is the longer of two: the time to read each input once, and the time of the operations. Both are
computed from the machine's rates, measured in the same run. Data that fits a cache can be read faster.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.arch.layer import LayerGeometry
from cluster.attention.ancestor_bits import line_bits
from cluster.attention.gather import Gather
from cluster.batch import AttentionMetadata, HostBounds, PromptRows, TreeRows
from cluster.bench.ceilings import ceilings, timed
from cluster.bench.report import Say, machine, median, ratio, records
from cluster.engine.backends import bind_attention, select_kernels
from cluster.kernels.interface import Activation, Angles, HeadNorms, Kernels
from cluster.kernels.torch_kernels import TorchKernels
from cluster.kv.codes import coded
from cluster.kv.page_table import PageTable
from cluster.kv.pool import pool_bytes

CPU = torch.device("cpu")
PAGE = 16
LAYER = LayerGeometry(2048, 32, 8, 64, 8192, 1e-5)  # a layer of a model with a billion parameters


@dataclass(frozen=True, slots=True)
class Size:
    """The measured layer, the length of prefixes, numbers of rows, the dtypes, and how often each kernel is
    measured.
    """

    layer: LayerGeometry = LAYER
    prefix: int = 2048
    rows: tuple[int, ...] = (1, 4, 8, 32)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    repeats: int = 9


QUICK = Size(LayerGeometry(256, 4, 2, 64, 512, 1e-5), prefix=128, rows=(1, 8), repeats=2)


class KernelCase(NamedTuple):
    """One call of a kernel on some rows. `read`: bytes that the call must read. `computed`: its floating-point
    operations.
    """

    kernel: str
    rows: str
    run: Callable[[], object]
    read: float
    computed: float


@torch.inference_mode()
def measure(size: Size, say: Say = print) -> dict[str, Any]:
    """Measure every kernel and its reference implementation; return times, and shares of the possible time."""
    best, figures = ceilings(), []
    say(f"kernels: {best.bytes / 1e9:.1f} GB/s read, {best.flops / 1e9:.0f} GFLOP/s")
    for dtype in size.dtypes:
        serving = select_kernels("auto", CPU, dtype)
        for own, twin in zip(works(size, serving, dtype), works(size, TorchKernels(), dtype), strict=True):
            took = turns(own, twin, size.repeats)
            possible = best.least_seconds(own.read, own.computed)
            say(f"kernels: {own.kernel}, {own.rows}, {dtype}: {took[0] * 1e6:.0f} us")
            figures.append(
                {
                    "kernel": own.kernel,
                    "dtype": str(dtype).removeprefix("torch."),
                    "rows": own.rows,
                    "us": took[0] * 1e6,
                    "twin_us": took[1] * 1e6,
                    "ratio": ratio(took[1], took[0]),
                    "share": ratio(possible, took[0]),
                }
            )
    return {
        "what": "kernels",
        "machine": machine(),
        "serving": select_kernels("auto", CPU, torch.float32).about,
        "gigabytes_s": best.bytes / 1e9,
        "gigaflops": best.flops / 1e9,
        "figures": figures,
    }


def turns(own: KernelCase, twin: KernelCase, repeats: int) -> tuple[float, float]:
    """Return the seconds of one call of `own` and of `twin`, its reference implementation: medians over turns, which
    alternate and take some milliseconds.
    """
    own.run(), twin.run()
    calls = max(1, min(200, int(0.005 / max(1e-6, timed(own.run), timed(twin.run)))))
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats):
        for which in (0, 1) if turn % 2 else (1, 0):
            run = (own, twin)[which].run
            seconds[which].append(timed(partial(repeated, run, calls)) / calls)
    return median(seconds[0]), median(seconds[1])


def repeated(run: Callable[[], object], calls: int) -> None:
    """Call `run` `calls` times."""
    for _ in range(calls):
        run()


def works(size: Size, kernels: Kernels, dtype: torch.dtype) -> Iterator[KernelCase]:
    """Yield a case for each kernel of a layer. The random rows and weights are the same for any `kernels`."""
    g, each = size.layer, dtype.itemsize
    dice = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice).to(dtype)

    for name, inputs, outputs in (
        ("product", g.hidden, 2 * g.intermediate),
        ("product, down", g.intermediate, g.hidden),
    ):
        weight = kernels.weight(made(inputs, outputs) / inputs**0.5)
        for rows in size.rows:
            given = made(rows, inputs)
            read, computed = inputs * outputs * each, 2 * rows * inputs * outputs
            yield KernelCase(name, f"{rows} rows", partial(weight, given), read, computed)
    for rows in size.rows[:: len(size.rows) - 1]:
        yield from _row_works(g, rows, kernels, made, each)
    yield from attention_works(size, kernels, dtype)


def _row_works(
    g: LayerGeometry, rows: int, kernels: Kernels, made: Callable[..., Tensor], each: int
) -> Iterator[KernelCase]:
    said, x, more, scale = f"{rows} rows", made(rows, g.hidden), made(rows, g.hidden), made(g.hidden)
    yield KernelCase(
        "add and norm", said, lambda: kernels.add_norm(x, more, scale, g.eps), 2 * rows * g.hidden * each, 0
    )
    heads, angles = (
        made(rows, g.heads + g.kv_heads, g.head_dim),
        Angles(made(rows, 1, g.head_dim), made(rows, 1, g.head_dim)),
    )
    norms = HeadNorms(g.heads, made(g.head_dim), made(g.head_dim), g.eps)
    moved = heads.numel() * each
    yield KernelCase("rotate", said, lambda: kernels.rotate(heads, angles), moved, 0)
    yield KernelCase("norm and rotate heads", said, lambda: kernels.rotate(heads, angles, norms), moved, 0)
    both = made(rows, 2 * g.intermediate)
    yield KernelCase("activate", said, lambda: kernels.activate(both, Activation()), both.numel() * each, 0)


def attention_works(size: Size, kernels: Kernels, dtype: torch.dtype, fp8: bool = False) -> Iterator[KernelCase]:
    """Yield attention cases: decoding, a chain, a tree and a prompt chunk. All prefixes have the same length. The cache
    is in FP8 if `fp8`, otherwise in `dtype`.
    """
    g, prefix, dice = size.layer, size.prefix, torch.Generator().manual_seed(3)
    for name, requests, rows in (
        ("decode", 1, 1),
        ("decode", 8, 1),
        ("chain", 8, 4),
        ("tree", 4, 16),
        ("prompt", 1, 256),
    ):
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
        seen, bounds = (
            AttentionMetadata(write, tree, text),
            HostBounds(prefix, ((prefix, prefix + rows),) if text else ()),
        )

        def run(attention: Any = attention, q: Tensor = q, kv: Tensor = kv, told: Any = (bounds, seen)) -> Tensor:
            attention.prepare(told[0])
            attention.bind(told[1])
            out: Tensor = attention(0, q, kv)
            return out

        read = requests * (prefix + rows) * pool_bytes([g], dtype, fp8)
        computed = 4 * requests * rows * (prefix + rows / 2) * g.heads * g.head_dim
        yield KernelCase(f"attend, {name}", f"{requests} x {rows} rows", run, read, computed)


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    rows = [
        {
            "kernel": one["kernel"],
            "dtype": one["dtype"],
            "rows": one["rows"],
            "us": round(one["us"]),
            "twin us": round(one["twin_us"]),
            "times as fast": one["ratio"],
            "of possible": one["share"],
        }
        for one in result["figures"]
    ]
    best = f"{result['gigabytes_s']:.1f} GB/s read, {result['gigaflops']:.0f} GFLOP/s in float32"
    return f"{result['serving']}; {result['machine']['cpu']}; at best {best}\n{records(rows)}"
