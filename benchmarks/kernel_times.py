"""`python -m benchmarks kernels`: each kernel that serves on this CPU against its reference implementation in torch,
alternately in one run, and against the machine's ceilings.

The possible time is the longer of two: the time to read each input once, and the time of the operations. Both are
computed from the machine's rates, measured in the same run. Data that fits a cache can be read faster.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cluster.arch.layer import LayerGeometry
from cluster.bench.ceilings import ceilings
from cluster.bench.kernel_cases import CPU, LAYER, SMALL_LAYER, KernelCase, attention_cases, compare
from cluster.bench.report import Say, columns, machine, ratio
from cluster.engine.backends import select_kernels
from cluster.kernels.interface import Activation, Angles, HeadNorms, Kernels
from cluster.kernels.torch_kernels import TorchKernels


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


QUICK = Size(SMALL_LAYER, prefix=128, rows=(1, 8), repeats=2)


@torch.inference_mode()
def measure(size: Size, say: Say = print) -> dict[str, Any]:
    """Measure every kernel and its reference implementation; return times, and shares of the possible time."""
    best, figures = ceilings(), []
    say(f"kernels: {best.bytes / 1e9:.1f} GB/s read, {best.flops / 1e9:.0f} GFLOP/s")
    for dtype in size.dtypes:
        serving = select_kernels("auto", CPU, dtype)
        for own, twin in zip(works(size, serving, dtype), works(size, TorchKernels(), dtype), strict=True):
            took = compare(own.run, twin.run, size.repeats)
            possible = best.least_seconds(own.read, own.computed)
            say(f"kernels: {own.kernel}, {own.rows}, {dtype}: {took.seconds * 1e6:.0f} us")
            figures.append(
                {
                    "kernel": own.kernel,
                    "dtype": str(dtype).removeprefix("torch."),
                    "rows": own.rows,
                    "us": took.seconds * 1e6,
                    "twin_us": took.other_seconds * 1e6,
                    "ratio": took.times,
                    "share": ratio(possible, took.seconds),
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
    yield from attention_cases(g, size.prefix, kernels, dtype)


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


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    names = {"kernel": "kernel", "dtype": "dtype", "rows": "rows", "us": "us", "twin us": "twin_us"}
    figures = columns(
        result["figures"], names | {"times as fast": "ratio", "of possible": "share"}, whole=("us", "twin us")
    )
    best = f"{result['gigabytes_s']:.1f} GB/s read, {result['gigaflops']:.0f} GFLOP/s in float32"
    return f"{result['serving']}; {result['machine']['cpu']}; at best {best}\n{figures}"
