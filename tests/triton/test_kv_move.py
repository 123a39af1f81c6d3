"""Moving KV cells with Triton gives the result of the torch pool, also if some slots are both source and
destination.
"""

import pytest
import torch

from cluster.arch.cell import CodedCell
from cluster.kv.pool import KVPool
from cluster.kv.triton_pool import TritonPool
from tests.unit.kernels.test_product import DTYPES

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cell", [(2, 2, 8), (1, 1, 200), (2, 3, 33)])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_triton_kv_move_matches_reference_with_overlapping_slots(
    count: int, cell: tuple[int, int, int], dtype: torch.dtype
) -> None:
    generator, pools = (
        torch.Generator().manual_seed(count),
        [pool_class(3, 60, cell, dtype, CPU) for pool_class in (KVPool, TritonPool)],
    )
    pools[0].kv.normal_(generator=generator)
    pools[1].kv.copy_(pools[0].kv)
    slots = torch.randperm(60, generator=generator).view(4, 15)
    paths = torch.rand(4, 15, generator=generator).argsort(1)[:, :count]
    for pool in pools:
        pool.move_kv_cache(slots[:, :count], slots.gather(1, paths))
        pool.move_kv_cache(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 1]))
    assert torch.equal(pools[0].kv, pools[1].kv)


@pytest.mark.parametrize("cell", [CodedCell((2, 2, 8)), CodedCell((1, 1, 200), 150)])
def test_triton_kv_move_copies_fp8_codes_and_scales(cell: CodedCell) -> None:
    generator = torch.Generator().manual_seed(3)
    pools = [pool_class(3, 60, cell.shape, torch.bfloat16, CPU, cell) for pool_class in (KVPool, TritonPool)]
    pools[0].kv.random_(0, 256, generator=generator)
    pools[1].kv.copy_(pools[0].kv)
    slots = torch.randperm(60, generator=generator).view(4, 15)
    for pool in pools:
        pool.move_kv_cache(slots[:, :6], slots.flip(1)[:, 3:9])
    assert torch.equal(pools[0].kv, pools[1].kv)


def test_triton_kv_move_of_no_requests_changes_nothing() -> None:
    pool = TritonPool(1, 4, (2, 1, 8), torch.float32, CPU)
    no_slots = torch.zeros(0, 3, dtype=torch.int64)
    pool.move_kv_cache(no_slots, no_slots)
    assert not pool.kv.any()
