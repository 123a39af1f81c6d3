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
from cluster.bench.ceilings import measure_ceilings
from cluster.bench.kernel_cases import CPU, LAYER, SMALL_LAYER, KernelCase, attention_cases, compare_calls
from cluster.bench.report import LogProgress, columns_table, machine_info, ratio
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
def measure(size: Size, log_progress: LogProgress = print) -> dict[str, Any]:
    """Measure every kernel and its reference implementation; return times, and shares of the possible time."""
    ceilings, figures = measure_ceilings(), []
    log_progress(f"kernels: {ceilings.bytes_per_s / 1e9:.1f} GB/s read, {ceilings.flops_per_s / 1e9:.0f} GFLOP/s")
    for dtype in size.dtypes:
        kernels = select_kernels("auto", CPU, dtype)
        for case, reference_case in zip(
            kernel_cases(size, kernels, dtype), kernel_cases(size, TorchKernels(), dtype), strict=True
        ):
            comparison = compare_calls(case.run, reference_case.run, size.repeats)
            possible = ceilings.least_seconds(case.bytes_read, case.operations)
            log_progress(f"kernels: {case.kernel}, {case.rows}, {dtype}: {comparison.seconds * 1e6:.0f} us")
            figures.append(
                {
                    "kernel": case.kernel,
                    "dtype": str(dtype).removeprefix("torch."),
                    "rows": case.rows,
                    "us": comparison.seconds * 1e6,
                    "twin_us": comparison.baseline_seconds * 1e6,
                    "ratio": comparison.speedup,
                    "share": ratio(possible, comparison.seconds),
                }
            )
    return {
        "what": "kernels",
        "machine": machine_info(),
        "serving": select_kernels("auto", CPU, torch.float32).description,
        "gigabytes_s": ceilings.bytes_per_s / 1e9,
        "gigaflops": ceilings.flops_per_s / 1e9,
        "figures": figures,
    }


def kernel_cases(size: Size, kernels: Kernels, dtype: torch.dtype) -> Iterator[KernelCase]:
    """Yield a case for each kernel of a layer. The random rows and weights are the same for any `kernels`."""
    g, itemsize = size.layer, dtype.itemsize
    generator = torch.Generator().manual_seed(0)

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for name, inputs, outputs in (
        ("product", g.hidden, 2 * g.intermediate),
        ("product, down", g.intermediate, g.hidden),
    ):
        weight = kernels.weight(random_tensor(inputs, outputs) / inputs**0.5)
        for rows in size.rows:
            input_rows = random_tensor(rows, inputs)
            bytes_read, operations = inputs * outputs * itemsize, 2 * rows * inputs * outputs
            yield KernelCase(name, f"{rows} rows", partial(weight, input_rows), bytes_read, operations)
    for rows in size.rows[:: len(size.rows) - 1]:
        yield from _row_kernel_cases(g, rows, kernels, random_tensor, itemsize)
    yield from attention_cases(g, size.prefix, kernels, dtype)


def _row_kernel_cases(
    g: LayerGeometry, rows: int, kernels: Kernels, random_tensor: Callable[..., Tensor], itemsize: int
) -> Iterator[KernelCase]:
    row_text, x, residual, scale = (
        f"{rows} rows",
        random_tensor(rows, g.hidden),
        random_tensor(rows, g.hidden),
        random_tensor(g.hidden),
    )
    yield KernelCase(
        "add and norm", row_text, lambda: kernels.add_norm(x, residual, scale, g.eps), 2 * rows * g.hidden * itemsize, 0
    )
    heads, angles = (
        random_tensor(rows, g.heads + g.kv_heads, g.head_dim),
        Angles(random_tensor(rows, 1, g.head_dim), random_tensor(rows, 1, g.head_dim)),
    )
    norms = HeadNorms(g.heads, random_tensor(g.head_dim), random_tensor(g.head_dim), g.eps)
    bytes_moved = heads.numel() * itemsize
    yield KernelCase("rotate", row_text, lambda: kernels.rotate(heads, angles), bytes_moved, 0)
    yield KernelCase("norm and rotate heads", row_text, lambda: kernels.rotate(heads, angles, norms), bytes_moved, 0)
    gate_and_up = random_tensor(rows, 2 * g.intermediate)
    yield KernelCase(
        "activate", row_text, lambda: kernels.activate(gate_and_up, Activation()), gate_and_up.numel() * itemsize, 0
    )


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    names = {"kernel": "kernel", "dtype": "dtype", "rows": "rows", "us": "us", "reference us": "twin_us"}
    figures = columns_table(
        result["figures"],
        names | {"times as fast": "ratio", "of possible": "share"},
        rounded_headers=("us", "reference us"),
    )
    best = f"{result['gigabytes_s']:.1f} GB/s read, {result['gigaflops']:.0f} GFLOP/s in float32"
    return f"{result['serving']}; {result['machine']['cpu']}; at best {best}\n{figures}"
