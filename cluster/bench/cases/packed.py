"""`aerie bench packed`: matrix products with weights that stay quantised, against dequantised weights, in one run.

The matrix fits no cache, so products with few rows are bound by memory. For every format, products with the quantised
and with the dequantised matrix take turns.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cluster.bench.kernel_cases import CPU, compare
from cluster.bench.report import Say, columns, machine
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


def measure(size: Size, say: Say = print) -> dict[str, Any]:
    """Return the milliseconds and bytes of each contender, JSON-ready."""
    figures = []
    for dtype in DTYPES:
        kernels = select_kernels("auto", CPU, dtype)
        say(f"{str(dtype).removeprefix('torch.')} rows, kernels in {kernels.about}")
        dense = kernels.weight(torch.randn(size.inputs, size.outputs).to(dtype))
        for kind, group, zeros in FORMATS:
            figures += _beside(kernels, dense, drawn(size, kind, group, zeros), dtype, size)
    return {"what": "packed", "machine": machine(), "inputs": size.inputs, "outputs": size.outputs, "figures": figures}


def drawn(size: Size, kind: Kind, group: int, zeros: bool) -> Quantised:
    """Return a random matrix in a format, which has the fields of an entry of `FORMATS`."""
    most = 16 if kind in ("int4", "fp4") else 120  # codes below 120 exclude FP8's NaN
    shape = size.outputs, -(-size.inputs // group) if group else 1
    zero = torch.randint(most, shape).to(torch.uint8) if zeros else None
    codes = torch.randint(most, (size.outputs, size.inputs)).to(torch.uint8)
    return Quantised(kind, codes, torch.rand(shape).to(torch.bfloat16), zero, group or size.inputs)


def _beside(kernels: Kernels, dense: Weight, matrix: Quantised, dtype: torch.dtype, size: Size) -> list[dict[str, Any]]:
    packed = kernels.quantised(matrix, dtype)
    about = matrix.about + (", zeros" if matrix.zeros is not None else "")
    found = []
    for count in size.rows:
        rows = torch.randn(count, size.inputs).to(dtype)
        took = compare(partial(packed, rows), partial(dense, rows), size.repeats)
        found.append(
            {
                "format": about,
                "dtype": str(dtype).removeprefix("torch."),
                "kept": kernels.keeps(matrix, dtype),
                "rows": count,
                "ms": round(1000 * took.seconds, 3),
                "dequantised_ms": round(1000 * took.other_seconds, 3),
                "times": round(took.times, 2),
                "bytes": packed.nbytes,
                "dequantised_bytes": dense.nbytes,
            }
        )
    return found


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    keys = {"rows of": "dtype", "format": "format", "rows": "rows", "packed ms": "ms"}
    keys |= {"dequantised ms": "dequantised_ms", "times as fast": "times"}
    keys |= {"packed MB": "bytes", "dequantised MB": "dequantised_bytes"}
    rows = [
        one | {key: round(one[key] / 1e6, 1) for key in ("bytes", "dequantised_bytes")} for one in result["figures"]
    ]
    return f"a matrix of {result['inputs']} x {result['outputs']}\n" + columns(rows, keys)
