"""`aerie bench cache`: attention over a KV cache in FP8 against a KV cache in the model's dtype, alternately in one
run.

One layer is measured: it stores the new cells, and computes attention over a prefix of a given length for each request.
"""

from dataclasses import dataclass
from typing import Any

import torch

from cluster.arch.layer import LayerGeometry
from cluster.bench.kernel_cases import CPU, LAYER, SMALL_LAYER, attention_cases, compare
from cluster.bench.report import Say, columns, machine, ratio
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
def measure(size: Size, say: Say = print) -> dict[str, Any]:
    """Return the microseconds of each contender, and the bytes of a token in one layer, JSON-ready."""
    figures = []
    for dtype in size.dtypes:
        serving, name = select_kernels("auto", CPU, dtype), str(dtype).removeprefix("torch.")
        plain, coded = (pool_bytes([size.layer], dtype, fp8) for fp8 in (False, True))
        say(f"cache: {name} and FP8, kernels in {serving.about}")
        for prefix in size.prefixes:
            cases = (attention_cases(size.layer, prefix, serving, dtype, fp8) for fp8 in (True, False))
            for own, other in zip(*cases, strict=True):
                took = compare(own.run, other.run, size.repeats)
                figures.append(
                    {
                        "dtype": name,
                        "prefix": prefix,
                        "what": own.kernel.removeprefix("attend, "),
                        "rows": own.rows,
                        "fp8_us": took.seconds * 1e6,
                        "us": took.other_seconds * 1e6,
                        "ratio": took.times,
                        "fp8_bytes": coded,
                        "bytes": plain,
                        "bytes_ratio": ratio(plain, coded),
                    }
                )
    return {"what": "cache", "machine": machine(), "figures": figures}


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    keys = {"dtype": "dtype", "prefix": "prefix", "attention of": "what", "rows": "rows", "FP8 us": "fp8_us"}
    keys |= {"dtype's us": "us", "times as fast": "ratio", "bytes": "of", "times less": "bytes_ratio"}
    rows = [{**one, "of": f"{one['fp8_bytes']} of {one['bytes']}"} for one in result["figures"]]
    figures = columns(rows, keys, whole=("FP8 us", "dtype's us"))
    return f"{result['machine']['cpu']}; a token's bytes are those of one layer\n{figures}"
