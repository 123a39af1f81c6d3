import resource
from pathlib import Path

import torch

from cluster.arch.cell import Cell
from cluster.batch import PageCopy
from cluster.kv.pool import KVPool, copied_slots
from tests.unit.kv.move_contract import check_window_pool_moves

CPU = torch.device("cpu")


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_kv_pool_is_zeroed_and_uses_memory_only_where_written() -> None:
    resident_before = resident_bytes()
    pool = KVPool(1, 1 << 20, Cell(4, 64, 64), torch.float32, CPU)
    assert pool.kv.data_ptr() % 64 == 0
    assert pool.kv[0, 12345].count_nonzero() == 0
    pool.kv[0, 12345] = 1.0
    assert pool.kv.numel() * 4 == 1 << 31
    assert resident_bytes() - resident_before < 1 << 27, "much of the pool's 2 GiB is resident"


def test_page_copies_read_all_sources_before_overwriting_in_every_pool() -> None:
    pools = [KVPool(layers, 16, Cell(1, 2, 2), torch.float64, CPU) for layers in (1, 3)]
    for pool in pools:
        pool.kv.copy_(torch.arange(16.0).view(1, 16, 1, 1, 1).expand_as(pool.kv))
    copies = torch.tensor(copied_slots([PageCopy(1, 2, 3), PageCopy(2, 3, 2)], 4)).view(2, -1)
    for pool in pools:
        pool.move_kv_cache(*copies)
        slots = pool.kv[-1, :, 1, 0, 1].tolist()
        assert slots == [0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 11, 8, 9, 14, 15]
    assert copied_slots([], 4) == []


def test_torch_window_pool_moves_the_pages_that_it_keeps() -> None:
    check_window_pool_moves(KVPool)
