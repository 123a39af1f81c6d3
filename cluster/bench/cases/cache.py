"""`aerie bench cache`: attention over a KV cache in FP8 against a KV cache in the model's dtype, alternately in one
run.

One layer is measured: it stores the new cells, and computes attention over a prefix of a given length for each request.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from cluster.arch.layer import LayerGeometry
from cluster.bench.cases import kernels
from cluster.bench.report import Say, machine, ratio, table
from cluster.engine.backends import select_kernels
from cluster.kv.pool import pool_bytes


@dataclass(frozen=True, slots=True)
class Size:
    """The measured layer, the lengths of prefixes, the model's dtypes, and how often each cache is measured."""

    layer: LayerGeometry = kernels.LAYER
    prefixes: tuple[int, ...] = (512, 4096)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    repeats: int = 9


QUICK = Size(kernels.QUICK.layer, (128,), repeats=2)


@torch.inference_mode()
def measure(size: Size, say: Say = print) -> dict[str, Any]:
    """Return the microseconds of each contender, and the bytes of a token in one layer, JSON-ready."""
    figures = []
    for dtype in size.dtypes:
        serving, name = select_kernels("auto", torch.device("cpu"), dtype), str(dtype).removeprefix("torch.")
        plain, coded = (pool_bytes([size.layer], dtype, fp8) for fp8 in (False, True))
        say(f"cache: {name} and FP8, kernels in {serving.about}")
        for prefix in size.prefixes:
            of = replace(kernels.QUICK, layer=size.layer, prefix=prefix)
            works = (kernels.attention_works(of, serving, dtype, fp8) for fp8 in (True, False))
            for own, other in zip(*works, strict=True):
                took = kernels.turns(own, other, size.repeats)
                figures.append(
                    {
                        "dtype": name,
                        "prefix": prefix,
                        "what": own.kernel.removeprefix("attend, "),
                        "rows": own.rows,
                        "fp8_us": took[0] * 1e6,
                        "us": took[1] * 1e6,
                        "ratio": ratio(took[1], took[0]),
                        "fp8_bytes": coded,
                        "bytes": plain,
                        "bytes_ratio": ratio(plain, coded),
                    }
                )
    return {"what": "cache", "machine": machine(), "figures": figures}


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    headers = (
        "dtype",
        "prefix",
        "attention of",
        "rows",
        "FP8 us",
        "dtype's us",
        "times as fast",
        "bytes",
        "times less",
    )
    rows = [
        [
            *(one[key] for key in ("dtype", "prefix", "what", "rows")),
            round(one["fp8_us"]),
            round(one["us"]),
            one["ratio"],
            f"{one['fp8_bytes']} of {one['bytes']}",
            one["bytes_ratio"],
        ]
        for one in result["figures"]
    ]
    return f"{result['machine']['cpu']}; a token's bytes are those of one layer\n{table(headers, rows)}"
