"""Attention by Triton in bfloat16 against its definition in float64, of every kind of layer, over trees and texts.

Each kind is a process of its own, as the programs of them all take minutes to compile one after the other. What a
program does not write stays NaN: all memory is filled with it before.
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
AT_ONCE = 8


def there(given: Any, device: torch.device) -> Any:
    """`given` with all its tensors on the device."""
    if isinstance(given, Tensor):
        return given.to(device)
    if not hasattr(given, "__dataclass_fields__"):
        return given
    return replace(given, **{own.name: there(getattr(given, own.name), device) for own in fields(given)})


def attended(case: Case, stage: Stage, make: Any = TritonAttention) -> Any:
    """An attention over the case's cells on the device, bound to what its rows see."""
    device, held = stage.device, case.filled()
    table = PageTable(case.table.idle_row, case.table.length, case.page_size, device)
    table.device_pages.copy_(case.table.device_pages)
    pool = TritonPool(2, held.slots, held.cell, case.dtype, device, held.fp8_cell)
    pool.kv.copy_(held.kv)
    attention = make(pool, table, AttentionShape(case.heads, (None, case.window), 0.3, case.values))
    attention.bind(there(case.seen(), device))
    return attention


def filled_with_nan(stage: Stage) -> None:
    """New memory is full of NaN from now on."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(4, device=stage.device).isnan().all()


def check(stage: Stage, kind: str, shape: str) -> None:
    with stage.check(f"attention, {kind}, {shape}") as facts:
        given = {"heads": 4, "kv_heads": 2} | (LONG if shape == "long" else SHAPES[shape]) | KINDS[kind]
        wide = (576,) if "latent" in KINDS[kind] else ()
        for d in stage.either((24,), (64, 128, 192, *wide)):
            case = Case(**given, page_size=16, lies="scattered", dtype=torch.bfloat16, d=d, seed=stage.seed)
            made = attended(case, stage)
            out = made(1, case.q.to(stage.device), case.kv.to(stage.device), there(case.sinks, stage.device))
            early = [row for row, text in enumerate(case.texts()) if len(text) - 1 < case.first]
            out = out.index_fill(0, torch.tensor(early, dtype=torch.int64, device=stage.device), 0)
            stage.near(facts, {f"d {d}": out}, {f"d {d}": case.expected()})


def of_kind(out: Path, dry: bool, seed: int, kind: str) -> list[str]:
    """Check one kind, in whatever process; the checks that failed."""
    stage = Stage("attention", out, dry, seed)
    if not dry:
        torch.set_num_threads(1)
    filled_with_nan(stage)
    with torch.inference_mode():
        for shape in stage.either(("all",), ("all", "wide", "long")):
            check(stage, kind, shape)
    return stage.failed


def work(stage: Stage) -> None:
    given = stage.out, stage.dry, stage.seed
    if stage.dry:
        failed = [of_kind(*given, kind) for kind in KINDS]
    else:
        count, how = min(AT_ONCE, os.cpu_count() or 1), multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(count, how) as pool:
            failed = list(pool.map(of_kind, *([one] * len(KINDS) for one in given), KINDS))
    stage.failed += [name for names in failed for name in names]


if __name__ == "__main__":
    raise SystemExit(run("attention", work))
