"""Attention over an FP8 cache: every backend stores the same codes, and the error against an unquantised cache is
within FP8's rounding error. The kinds "FP8" in `test_gather_methods` compare the output with the definition over the
cached values.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.arch.cell import Cell
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
from tests.unit.attention.dense import CPU, Case, keys_values
from tests.unit.attention.fp8 import error_bound
from tests.unit.attention.test_c_attention import check_not_finite
from tests.unit.attention.test_gather_methods import TREE
from tests.unit.kernels.library import c_library

BACKENDS: dict[str, Callable[..., Callable[..., AttentionBackend]]] = {
    "torch": lambda: lambda pool, table, shape: TorchAttention(pool, Gather(table, 6), shape),
    "c": lambda: partial(CAttention, library=c_library()),
    "triton": lambda: TritonAttention,
}
CELLS = {
    "grouped": (Cell(3, 20, 20), 6),
    "two widths": (Cell(3, 24, 12), 6),
    "latent": (Cell(1, 40, 32, is_latent=True), 4),
}
"""Cells, and the numbers of query heads."""


def one_row(
    backend: str, dtype: torch.dtype, name: str = "grouped", slots: int = 96
) -> tuple[PageTable, KVPool, AttentionBackend]:
    """Return the page table of one request, an FP8 pool, and the attention of `backend` over that pool."""
    cell, heads = CELLS[name]
    table = PageTable(1, slots - 16, 16, CPU)
    table.device_pages[0] = torch.arange(table.device_pages.shape[1]) + 1
    pool = KVPool(1, slots, cell, dtype, CPU, fp8=True)
    return table, pool, BACKENDS[backend]()(pool, table, AttentionShape(heads, (None,), 0.3))


DTYPES = (torch.float64, torch.float32, torch.bfloat16)
INTERPRETED = [("latent", torch.float32), ("latent", torch.bfloat16), ("two widths", torch.float32)]
STORES = [
    *product(["c"], CELLS, DTYPES),
    *(
        pytest.param("triton", *case, marks=() if case in INTERPRETED else pytest.mark.slow)
        for case in product(CELLS, DTYPES)
    ),
]


@pytest.mark.parametrize(("backend", "name", "dtype"), STORES)
def test_backend_stores_the_same_fp8_bytes_as_the_reference_encoder(
    backend: str, name: str, dtype: torch.dtype
) -> None:
    """The numbers have all sizes, and some are so small that they are read back as 0. Denormal numbers of bfloat16 are
    left out, as Triton's interpreter does not support them.
    """
    lowest_exponent = -28 if dtype == torch.bfloat16 else -44
    cell, heads = CELLS[name]
    table, pool, attention = one_row(backend, dtype, name)
    generator = torch.Generator().manual_seed(2)
    kv = torch.randn(30, *cell.shape, generator=generator, dtype=torch.float64)
    kv *= 2.0 ** torch.randint(-20, 1, kv.shape, generator=generator)
    kv = (kv * torch.logspace(lowest_exponent, 37, 30, dtype=torch.float64).view(-1, 1, 1, 1)).to(dtype)
    kv[7], kv[8, 0, 0] = 0, max_magnitude(dtype)
    row, lens = torch.tensor([0]), torch.tensor([0])
    metadata = AttentionMetadata(table.slots(row, torch.arange(30)), TreeRows(row, lens, chain_bits(30, 30, CPU), 30))
    attention.prepare(HostBounds())
    attention.bind(metadata)
    attention(0, torch.zeros(30, heads, cell.key_dim, dtype=dtype), kv)
    assert torch.equal(pool.kv[0, metadata.write], encode(kv, cell))


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


@pytest.mark.parametrize("kind", [{"kv_heads": 2}, {"kv_heads": 2, "values": 40}, {"latent": True, "kv_heads": 1}])
@pytest.mark.parametrize("backend", ["torch", "c"])
def test_fp8_attention_error_stays_within_the_rounding_bound(backend: str, kind: dict[str, Any]) -> None:
    """The error of a number is at most 1/16 of it, so the error of a score is at most s = scale * sum |q| |k| / 16, and
    a softmax weight changes by a factor of at most exp(2 s). The error of an output is then at most the error of its
    values, plus exp(2 s) - 1 times the largest value.
    """
    case_options = {
        "heads": 4,
        "committed": (40, 5, 90),
        "parents": TREE,
        "chunks": ((3, 30),),
        "page_size": 4,
        "d": 24,
    }
    unquantised_case = Case(**case_options, lies="scattered", **kind)
    fp8_case = replace(unquantised_case, fp8=True)
    error = (fp8_case.backend_output(make=BACKENDS[backend]()) - unquantised_case.expected()).abs()
    assert error.max() > 1e-3, "the FP8 cache must change the output"
    assert (error <= allowed_errors(unquantised_case)).all()
    assert error.mean() < 0.05, "the mean error of values of about 1 must be small"


def allowed_errors(case: Case) -> Tensor:
    """Return the largest allowed error of each row's outputs against those over an unquantised cache."""
    cache = case.pool.kv[1].clone()
    cache[case.write()] = case.kv
    cache, error_bounds, rows = cache.nan_to_num(), error_bound(cache.nan_to_num(), case.cell), []
    for q, visible in zip(case.q, case.visible_cells(), strict=True):
        slots = torch.tensor([case.slots[i][at] for i, at in visible])
        _, values = keys_values(cache[slots].abs(), case.cell)
        key_errors, value_errors = keys_values(error_bounds[slots], case.cell)
        for head in range(case.heads):
            kv_head = head // (case.heads // case.cell.kv_heads)
            score_error = 0.3 * (key_errors[:, kv_head] @ q[head].abs()).max()
            largest_value = values[:, kv_head].max() + value_errors[:, kv_head].max()
            rows.append(value_errors[:, kv_head].amax(0) + (torch.exp(2 * score_error) - 1) * largest_value)
    return torch.cat(rows).view(len(case.q), -1)
