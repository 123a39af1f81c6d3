"""The check that attention reads borrowed cells: those that an earlier layer of the same forward has written."""

from collections.abc import Callable
from typing import Any

import torch

from cluster.attention.shape import AttentionShape
from cluster.batch import HostBounds
from cluster.models.runner import AttentionBackend
from tests.unit.attention.dense import Case

MIXED: dict[str, Any] = {"heads": 4, "kv_heads": 2, "committed": (5, 0), "parents": (-1, 0, 0), "chunks": ((2, 9),)}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 4, "sunk": True},
    "FP8": {"fp8": True},
    "two widths": {"d": 12, "values": 8},
}


def check_borrowed(kind: str, make: Callable[..., AttentionBackend], dtype: torch.dtype = torch.float64) -> None:
    """Check that a call without cells gives what the call that wrote them gave, for the same queries, and that it
    writes nothing. `make` returns the backend for a pool, a page table and a shape.
    """
    case = Case(**MIXED, **KINDS[kind], page_size=4, lies="tail", dtype=dtype)
    pool = case.filled_pool()
    attention = make(pool, case.table, AttentionShape(4, (None, case.window), 0.3))
    attention.prepare(HostBounds(5, ((2, 9),)))
    attention.bind(case.attention_metadata())
    expected = attention(1, case.q, case.kv, case.sinks)
    stored = pool.kv.clone()
    assert torch.equal(attention(1, case.q, None, case.sinks), expected)
    assert torch.equal(attention(1, -case.q, None, case.sinks), attention(1, -case.q, case.kv, case.sinks))
    assert torch.equal(pool.kv.view(torch.uint8), stored.view(torch.uint8))
