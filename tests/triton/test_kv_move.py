"""Moving KV cells with Triton gives the result of the torch pool."""

import pytest
import torch

from cluster.arch.cell import Cell
from cluster.kv.triton_pool import TritonPool
from tests.unit.kernels.test_product import DTYPES
from tests.unit.kv.move_contract import (
    CELLS,
    FP8_CELLS,
    check_empty_moves,
    check_fp8_moves,
    check_one_launch_per_pool,
    check_overlapping_moves,
    check_window_pool_moves,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("count", [1, 3, 6])
def test_triton_kv_move_matches_reference_with_overlapping_slots(count: int, cell: Cell, dtype: torch.dtype) -> None:
    check_overlapping_moves(TritonPool, count, cell, dtype)


@pytest.mark.parametrize("cell", FP8_CELLS)
def test_triton_kv_move_copies_fp8_codes_and_scales(cell: Cell) -> None:
    check_fp8_moves(TritonPool, cell)


def test_triton_kv_move_of_no_requests_changes_nothing() -> None:
    check_empty_moves(TritonPool)


def test_triton_window_pool_moves_the_pages_that_it_keeps() -> None:
    check_window_pool_moves(TritonPool)


def test_a_move_is_one_launch_for_each_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    check_one_launch_per_pool(TritonPool, "cluster.kv.triton_pool.launch", monkeypatch)
