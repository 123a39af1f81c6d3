"""`aerie bench cache`: attention over a KV cache in FP8 against a KV cache in the model's dtype. Calls with
the two caches alternate in one run.

One layer is measured on the CPU: it stores the K and V of the new tokens, and computes attention over a prefix of a
given length for each request.
"""

from dataclasses import dataclass
from typing import Any

import torch

from cluster.arch.layer import LayerGeometry
from cluster.bench.kernel_cases import CPU, LAYER, SMALL_LAYER, attention_cases, compare_calls
from cluster.bench.report import LogProgress, columns_table, machine_info, ratio
from cluster.engine.backends import select_kernels
from cluster.kv.pool import pool_bytes


@dataclass(frozen=True, slots=True)
class Size:
    """The measured layer, the lengths of prefixes, the model's dtypes, and how often each cache is measured."""

    layer: LayerGeometry = LAYER
    prefixes: tuple[int, ...] = (512, 4096)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    repeats: int = 9


QUICK = Size(SMALL_LAYER, (128,), repeats=2)


@torch.inference_mode()
def measure(size: Size, log_progress: LogProgress = print) -> dict[str, Any]:
    """Return the microseconds of a call with each cache, and the bytes of a token in one layer, JSON-ready."""
    figures = []
    for dtype in size.dtypes:
        kernels, name = select_kernels("auto", CPU, dtype), str(dtype).removeprefix("torch.")
        dtype_bytes, fp8_bytes = (pool_bytes([size.layer], dtype, fp8) for fp8 in (False, True))
        log_progress(f"cache: {name} and FP8, kernels in {kernels.description}")
        for prefix in size.prefixes:
            cases = (attention_cases(size.layer, prefix, kernels, dtype, fp8) for fp8 in (True, False))
            for fp8_case, dtype_case in zip(*cases, strict=True):
                comparison = compare_calls(fp8_case.run, dtype_case.run, size.repeats)
                figures.append(
                    {
                        "dtype": name,
                        "prefix": prefix,
                        "what": fp8_case.kernel.removeprefix("attend, "),
                        "rows": fp8_case.rows,
                        "fp8_us": comparison.seconds * 1e6,
                        "us": comparison.baseline_seconds * 1e6,
                        "ratio": comparison.speedup,
                        "fp8_bytes": fp8_bytes,
                        "bytes": dtype_bytes,
                        "bytes_ratio": ratio(dtype_bytes, fp8_bytes),
                    }
                )
    return {"what": "cache", "machine": machine_info(), "figures": figures}


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    keys = {"dtype": "dtype", "prefix": "prefix", "attention of": "what", "rows": "rows", "FP8 us": "fp8_us"}
    keys |= {"dtype's us": "us", "times as fast": "ratio", "bytes": "of", "times less": "bytes_ratio"}
    rows = [{**figure, "of": f"{figure['fp8_bytes']} of {figure['bytes']}"} for figure in result["figures"]]
    figures = columns_table(rows, keys, rounded_headers=("FP8 us", "dtype's us"))
    return f"{result['machine']['cpu']}; a token's bytes are those of one layer\n{figures}"
