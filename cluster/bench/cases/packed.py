"""`aerie bench packed`: matrix products with weights that stay quantised, against dequantised weights, in one run.

In a full run, the dequantised matrix is larger than the caches of most CPUs, so its products with few rows are bound by
memory. For every format, products with a quantised matrix and with a dequantised matrix of the same size take turns.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cluster.bench.kernel_cases import CPU, compare_calls
from cluster.bench.report import LogProgress, columns_table, machine_info
from cluster.engine.backends import select_kernels
from cluster.kernels.interface import Kernels, Weight
from cluster.kernels.quantised import Kind, Quantised


@dataclass(frozen=True, slots=True)
class Size:
    """A matrix of `inputs` by `outputs`, the `rows` of each product, and how often each product is measured."""

    inputs: int = 4096
    outputs: int = 14336
    rows: tuple[int, ...] = (1, 8, 32)
    repeats: int = 15


QUICK = Size(512, 1024, (1, 8), 3)
FORMATS: tuple[tuple[Kind, int, bool], ...] = (  # number format, inputs per group (0: all), whether with zero points
    ("fp8", 0, False),
    ("fp8", 128, False),
    ("int8", 0, False),
    ("int4", 128, False),
    ("int4", 128, True),
    ("int4", 32, False),
    ("fp4", 32, False),
)
DTYPES = (torch.float32, torch.bfloat16)


def measure(size: Size, log_progress: LogProgress = print) -> dict[str, Any]:
    """Return the milliseconds and bytes of each product, with quantised and with dequantised weights, JSON-ready."""
    figures = []
    for dtype in DTYPES:
        kernels = select_kernels("auto", CPU, dtype)
        log_progress(f"{str(dtype).removeprefix('torch.')} rows, kernels in {kernels.description}")
        dense = kernels.weight(torch.randn(size.inputs, size.outputs).to(dtype))
        for kind, group, with_zeros in FORMATS:
            figures += _compare_products(kernels, dense, random_matrix(size, kind, group, with_zeros), dtype, size)
    return {
        "what": "packed",
        "machine": machine_info(),
        "inputs": size.inputs,
        "outputs": size.outputs,
        "figures": figures,
    }


def random_matrix(size: Size, kind: Kind, group: int, with_zeros: bool) -> Quantised:
    """Return a random matrix in the number format `kind`. `group` inputs share a scale (0: all inputs). If
    `with_zeros`, the matrix has zero points.
    """
    code_bound = 16 if kind in ("int4", "fp4") else 120  # codes below 120 exclude FP8's NaN
    shape = size.outputs, -(-size.inputs // group) if group else 1
    zero_points = torch.randint(code_bound, shape).to(torch.uint8) if with_zeros else None
    codes = torch.randint(code_bound, (size.outputs, size.inputs)).to(torch.uint8)
    return Quantised(kind, codes, torch.rand(shape).to(torch.bfloat16), zero_points, group or size.inputs)


def _compare_products(
    kernels: Kernels, dense: Weight, matrix: Quantised, dtype: torch.dtype, size: Size
) -> list[dict[str, Any]]:
    packed_weight = kernels.quantised(matrix, dtype)
    format_name = matrix.description + (", zeros" if matrix.zeros is not None else "")
    figures = []
    for row_count in size.rows:
        inputs = torch.randn(row_count, size.inputs).to(dtype)
        comparison = compare_calls(partial(packed_weight, inputs), partial(dense, inputs), size.repeats)
        figures.append(
            {
                "format": format_name,
                "dtype": str(dtype).removeprefix("torch."),
                "kept": kernels.keeps_quantised(matrix, dtype),
                "rows": row_count,
                "ms": round(1000 * comparison.seconds, 3),
                "dequantised_ms": round(1000 * comparison.baseline_seconds, 3),
                "times": round(comparison.speedup, 2),
                "bytes": packed_weight.nbytes,
                "dequantised_bytes": dense.nbytes,
            }
        )
    return figures


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    keys = {"rows of": "dtype", "format": "format", "rows": "rows", "packed ms": "ms"}
    keys |= {"dequantised ms": "dequantised_ms", "times as fast": "times"}
    keys |= {"packed MB": "bytes", "dequantised MB": "dequantised_bytes"}
    rows = [
        figure | {key: round(figure[key] / 1e6, 1) for key in ("bytes", "dequantised_bytes")}
        for figure in result["figures"]
    ]
    return f"a matrix of {result['inputs']} x {result['outputs']}\n" + columns_table(rows, keys)
