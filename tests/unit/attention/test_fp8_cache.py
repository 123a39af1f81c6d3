"""Attention over a cache in FP8: every backend stores the same codes, and is as far from a cache of numbers as FP8's
own rounding allows. That each is what the definition says of the numbers held: the kinds FP8 of `test_twins`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.arch.cell import CodedCell
from cluster.attention.ancestor_bits import chain_bits
from cluster.attention.c_backend import CAttention
from cluster.attention.gather import Gather
from cluster.attention.shape import AttentionShape
from cluster.attention.torch_backend import TorchAttention
from cluster.attention.triton_backend import TritonAttention
from cluster.batch import AttentionMetadata, HostBounds, TreeRows
from cluster.kv.codes import decode, encode, max_magnitude
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool
from cluster.models.runner import AttentionBackend
from tests.unit.attention.dense import CPU, Case
from tests.unit.attention.fp8 import bound
from tests.unit.attention.test_c_attention import check_not_finite
from tests.unit.attention.test_gather_methods import TREE
from tests.unit.kernels.library import c_library

BACKENDS: dict[str, Callable[..., Callable[..., AttentionBackend]]] = {
    "torch": lambda: lambda pool, table, shape: TorchAttention(pool, Gather(table, 6), shape),
    "c": lambda: partial(CAttention, library=c_library()),
    "triton": lambda: TritonAttention,
}
CELLS = {"grouped": (CodedCell((2, 3, 20)), 6, 20), "latent": (CodedCell((1, 1, 40), 32), 4, 32)}


def one_row(
    backend: str, dtype: torch.dtype, name: str = "grouped", slots: int = 96
) -> tuple[PageTable, KVPool, AttentionBackend]:
    """A table of one request, and attention over a pool in FP8."""
    cell, heads, values = CELLS[name]
    table = PageTable(1, slots - 16, 16, CPU)
    table.device_pages[0] = torch.arange(table.device_pages.shape[1]) + 1
    pool = KVPool(1, slots, cell.shape, dtype, CPU, cell)
    return table, pool, BACKENDS[backend]()(pool, table, AttentionShape(heads, (None,), 0.3, values))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("backend", ["c", "triton"])
def test_backend_stores_the_same_fp8_bytes_as_the_reference_encoder(
    backend: str, name: str, dtype: torch.dtype
) -> None:
    """To the byte, with numbers of all sizes, those included that are read back as 0; but for the denormal numbers of
    bfloat16, which Triton's interpreter does not know.
    """
    least = -28 if dtype == torch.bfloat16 else -44
    cell, heads, _ = CELLS[name]
    table, pool, attention = one_row(backend, dtype, name)
    dice = torch.Generator().manual_seed(2)
    kv = torch.randn(30, *cell.shape, generator=dice, dtype=torch.float64)
    kv *= 2.0 ** torch.randint(-20, 1, kv.shape, generator=dice)
    kv = (kv * torch.logspace(least, 37, 30, dtype=torch.float64).view(-1, 1, 1, 1)).to(dtype)
    kv[7], kv[8, 0, 0] = 0, max_magnitude(dtype)
    row, lens = torch.tensor([0]), torch.tensor([0])
    seen = AttentionMetadata(table.slots(row, torch.arange(30)), TreeRows(row, lens, chain_bits(30, 30, CPU), 30))
    attention.prepare(HostBounds())
    attention.bind(seen)
    attention(0, torch.zeros(30, heads, cell.shape[2], dtype=dtype), kv)
    assert torch.equal(pool.kv[0, seen.write], encode(kv, cell))


@pytest.mark.parametrize("backend", BACKENDS)
def test_non_finite_kv_affects_only_its_own_row_and_is_stored_as_zero(backend: str) -> None:
    table, pool, attention = one_row(backend, torch.float32)
    attention.prepare(HostBounds())
    check_not_finite(table, attention, (6, 3, 20))
    cells = decode(pool.kv[0], CELLS["grouped"][0], torch.float32)
    assert not cells[17].any() and cells[16].all() and cells[18].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_kv_too_large_for_an_fp8_scale_counts_as_non_finite(backend: str, dtype: torch.dtype) -> None:
    table, pool, attention = one_row(backend, dtype)
    row, lens = torch.tensor([0]), torch.tensor([0])
    kv = torch.ones(3, 2, 3, 20, dtype=dtype)
    kv[1, 1, 2, 4], kv[2, 0, 0, 0] = -torch.finfo(dtype).max, max_magnitude(dtype)
    attention.prepare(HostBounds())
    attention.bind(AttentionMetadata(table.slots(row, torch.arange(3)), TreeRows(row, lens, chain_bits(3, 3, CPU), 3)))
    out = attention(0, torch.zeros(3, 6, 20, dtype=dtype), kv)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()
    assert not decode(pool.kv[0], CELLS["grouped"][0], dtype)[17].any()


@pytest.mark.parametrize("kind", [{"kv_heads": 2}, {"latent": True, "kv_heads": 1}])
@pytest.mark.parametrize("backend", ["torch", "c"])
def test_fp8_attention_error_stays_within_the_rounding_bound(backend: str, kind: dict[str, Any]) -> None:
    """A number is off by 1/16 of itself at most, so a score by s = scale * sum |q| |k| / 16 and a weight by a factor of
    exp(2 s); a value then by what its own cells are off, and by exp(2 s) - 1 of the largest one.
    """
    given = {"heads": 4, "committed": (40, 5, 90), "parents": TREE, "chunks": ((3, 30),), "page_size": 4, "d": 24}
    numbers = Case(**given, lies="scattered", **kind)
    codes = replace(numbers, fp8=True)
    off = (codes.given(make=BACKENDS[backend]()) - numbers.expected()).abs()
    assert off.max() > 1e-3, "they are not the same"
    assert (off <= furthest(numbers)).all()
    assert off.mean() < 0.05, "and mostly much nearer: of values that are about 1"


def furthest(one: Case) -> Tensor:
    """How far each row's outputs may be from those over a cache of numbers."""
    memory, latent = one.pool.kv[1].clone(), one.values if one.latent else None
    memory[one.write()] = one.kv
    allowed, rows = bound(memory.nan_to_num(), latent), []
    for q, text in zip(one.q, one.texts(), strict=True):
        slots = torch.tensor([one.slot(*at) for at in text])
        value, spread = memory[slots][:, -1, :, : one.values].abs(), allowed[slots]
        for head in range(one.heads):
            own = head // (one.heads // memory.shape[2])
            score = 0.3 * (spread[:, 0, own] @ q[head].abs()).max()
            most = value[:, own].max() + spread[:, -1, own, : one.values].max()
            rows.append(spread[:, -1, own, : one.values].amax(0) + (torch.exp(2 * score) - 1) * most)
    return torch.cat(rows).view(len(one.q), -1)
