"""Compares attention by Triton in bfloat16 with its definition in float64.

The stage checks every kind of layer, over trees and prompts. Each kind runs in a process of its own, because compiling
the kernels of all kinds one after the other takes minutes. All memory is filled with NaN first, so a value that a
kernel does not write stays NaN.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.attention.shape import AttentionShape
from cluster.attention.triton_backend import TritonAttention
from cluster.kv.page_table import PageTable
from cluster.kv.triton_pool import TritonPool
from tests.gpu.stages.stage import Stage, run
from tests.unit.attention.dense import Case
from tests.unit.attention.test_gather_methods import KINDS, SHAPES, TREE

LONG: dict[str, Any] = {"committed": (2500, 700), "parents": TREE, "chunks": ((580, 600),)}
MAX_PROCESSES = 8


def to_device(value: Any, device: torch.device) -> Any:
    """Return a tensor or a dataclass with all its tensors on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if not hasattr(value, "__dataclass_fields__"):
        return value
    return replace(value, **{field.name: to_device(getattr(value, field.name), device) for field in fields(value)})


def bound_attention(case: Case, stage: Stage, backend_class: Any = TritonAttention) -> Any:
    """Return an attention backend over the KV cells of a case on the device, bound to the metadata of the case."""
    device, filled_pool = stage.device, case.filled_pool()
    table = PageTable(case.table.idle_row, case.table.length, case.page_size, device)
    table.device_pages.copy_(case.table.device_pages)
    pool = TritonPool(2, filled_pool.slots, filled_pool.cell, case.dtype, device, filled_pool.fp8)
    pool.kv.copy_(filled_pool.kv)
    attention = backend_class(pool, table, AttentionShape(case.heads, (None, case.window), 0.3))
    attention.bind(to_device(case.attention_metadata(), device))
    return attention


def filled_with_nan(stage: Stage) -> None:
    """Make torch fill all new memory with NaN from now on."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(4, device=stage.device).isnan().all()


def check(stage: Stage, kind: str, shape: str) -> None:
    with stage.check(f"attention, {kind}, {shape}") as facts:
        case_sizes = {"heads": 4, "kv_heads": 2} | (LONG if shape == "long" else SHAPES[shape]) | KINDS[kind]
        latent_widths = (576,) if "latent" in KINDS[kind] else ()
        for d in stage.dry_or_gpu((24,), (64, 128, 192, *latent_widths)):
            case = Case(**case_sizes, page_size=16, lies="scattered", dtype=torch.bfloat16, d=d, seed=stage.seed)
            attention = bound_attention(case, stage)
            out = attention(1, case.q.to(stage.device), case.kv.to(stage.device), to_device(case.sinks, stage.device))
            rows_before_first = [row for row, text in enumerate(case.visible_cells()) if len(text) - 1 < case.first]
            out = out.index_fill(0, torch.tensor(rows_before_first, dtype=torch.int64, device=stage.device), 0)
            stage.check_close(facts, {f"d {d}": out}, {f"d {d}": case.expected()})


def of_kind(out: Path, dry: bool, seed: int, kind: str) -> list[str]:
    """Check one kind in the current process, and return the names of the checks that failed."""
    stage = Stage("attention", out, dry, seed)
    if not dry:
        torch.set_num_threads(1)
    filled_with_nan(stage)
    with torch.inference_mode():
        for shape in stage.dry_or_gpu(("all",), ("all", "wide", "long")):
            check(stage, kind, shape)
    return stage.failed


def work(stage: Stage) -> None:
    stage_args = stage.out, stage.dry, stage.seed
    if stage.dry:
        failed = [of_kind(*stage_args, kind) for kind in KINDS]
    else:
        count, context = min(MAX_PROCESSES, os.cpu_count() or 1), multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(count, context) as pool:
            failed = list(pool.map(of_kind, *([argument] * len(KINDS) for argument in stage_args), KINDS))
    stage.failed += [name for names in failed for name in names]


if __name__ == "__main__":
    raise SystemExit(run("attention", work))
