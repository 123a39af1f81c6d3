"""Moving KV cells in C gives the result of the torch pool."""

import pytest
import torch

from cluster.arch.cell import Cell
from cluster.kv.c_pool import CPool
from cluster.kv.pool import KVPool
from tests.unit.kernels.library import c_library
from tests.unit.kv.move_contract import (
    CELLS,
    FP8_CELLS,
    check_empty_moves,
    check_fp8_moves,
    check_one_launch_per_pool,
    check_overlapping_moves,
    check_window_pool_moves,
)


def c_pool(*arguments: object) -> KVPool:
    """Return a pool that moves cells in C."""
    return CPool(*arguments, library=c_library())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("count", [1, 3, 6])
def test_c_kv_move_matches_reference_with_overlapping_slots(count: int, cell: Cell, dtype: torch.dtype) -> None:
    check_overlapping_moves(c_pool, count, cell, dtype)


@pytest.mark.parametrize("cell", FP8_CELLS)
def test_c_kv_move_copies_fp8_codes_and_scales(cell: Cell) -> None:
    check_fp8_moves(c_pool, cell)


def test_c_kv_move_of_no_requests_changes_nothing() -> None:
    check_empty_moves(c_pool)


def test_c_window_pool_moves_the_pages_that_it_keeps() -> None:
    check_window_pool_moves(c_pool)


def test_a_move_is_one_launch_for_each_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    check_one_launch_per_pool(c_pool, "cluster.kv.c_pool.native", monkeypatch)
