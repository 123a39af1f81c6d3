"""What every KV pool must do when it moves cells: give the result of the torch pool."""

from collections.abc import Callable

import pytest
import torch

from cluster.arch.cell import Cell
from cluster.kv.layer_pools import LayerPools
from cluster.kv.pool import KVPool
from cluster.kv.window_map import WindowMap

CPU = torch.device("cpu")
CELLS = [Cell(2, 8, 8), Cell(1, 200, 150, is_latent=True), Cell(3, 33, 33), Cell(2, 24, 16)]
FP8_CELLS = [Cell(2, 8, 8), Cell(1, 200, 150, is_latent=True), Cell(2, 24, 16)]
CreatePool = Callable[..., KVPool]
"""A factory that takes the arguments of `KVPool`."""


def check_overlapping_moves(create: CreatePool, count: int, cell: Cell, dtype: torch.dtype) -> None:
    """Check moves in which some slots are both source and destination: of requests `[R, n]`, and of pages `[n]`."""
    generator = torch.Generator().manual_seed(count)
    pools = [create_pool(3, 60, cell, dtype, CPU) for create_pool in (KVPool, create)]
    pools[0].kv.normal_(generator=generator)
    pools[1].kv.copy_(pools[0].kv)
    slots = torch.randperm(60, generator=generator).view(4, 15)
    paths = torch.rand(4, 15, generator=generator).argsort(1)[:, :count]
    for pool in pools:
        pool.move_kv_cache(slots[:, :count], slots.gather(1, paths))
        pool.move_kv_cache(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 1]))
    assert torch.equal(pools[0].kv, pools[1].kv)


def check_fp8_moves(create: CreatePool, cell: Cell) -> None:
    """Check that codes move together with their scales."""
    generator = torch.Generator().manual_seed(3)
    pools = [create_pool(3, 60, cell, torch.bfloat16, CPU, True) for create_pool in (KVPool, create)]
    pools[0].kv.random_(0, 256, generator=generator)
    pools[1].kv.copy_(pools[0].kv)
    slots = torch.randperm(60, generator=generator).view(4, 15)
    for pool in pools:
        pool.move_kv_cache(slots[:, :6], slots.flip(1)[:, 3:9])
    assert torch.equal(pools[0].kv, pools[1].kv)


def check_empty_moves(create: CreatePool) -> None:
    """Check that a move of no requests changes nothing."""
    pool, no_slots = create(1, 4, Cell(1, 8, 8), torch.float32, CPU), torch.zeros(0, 3, dtype=torch.int64)
    pool.move_kv_cache(no_slots, no_slots)
    assert not pool.kv.any()


def check_window_pool_moves(create: CreatePool) -> None:
    """Check that a window pool moves the cells of the pages that it keeps, for slots of the other pools, and that
    `move_own_slots` takes its own slots. Some windows of requests overlap with themselves.
    """
    generator = torch.Generator().manual_seed(4)
    window_map = WindowMap(20, 3, CPU)
    pages = torch.tensor([2, 3, 7, 11, 12, 20])
    window_map.apply(torch.stack([pages, torch.tensor([5, 1, 4, 2, 6, 3])]))
    pool = create(2, 21, Cell(2, 8, 8), torch.float32, CPU, False, window_map)
    pool.kv.normal_(generator=generator)
    expected = pool.kv.clone()
    slots = (pages.view(2, 3, 1) * 3 + torch.arange(3)).view(2, 9)
    destination, source = slots[:, :4], slots[:, [0, 2, 3, 8]]
    moves = zip(destination.flatten().tolist(), source.flatten().tolist(), strict=True)
    own = [[int(window_map.device_pages[slot // 3]) * 3 + slot % 3 for slot in pair] for pair in moves]
    cells = [expected[:, old].clone() for _, old in own]
    for (new, _), cell in zip(own, cells, strict=True):
        expected[:, new] = cell
    pool.move_kv_cache(destination, source)
    assert torch.equal(pool.kv, expected)
    pool.move_own_slots(torch.tensor([3, 4]), torch.tensor([4, 18]))
    expected[:, [3, 4]] = expected[:, [4, 18]]
    assert torch.equal(pool.kv, expected)


def check_one_launch_per_pool(create: CreatePool, launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a move over the pools of a model is one launch for each pool, however many layers it has. `launcher`
    is the name by which the pool's module launches.
    """
    window_map = WindowMap(20, 3, CPU)
    pools = [
        create(5, 60, Cell(2, 8, 8), torch.float32, CPU),
        create(3, 60, Cell(2, 24, 16), torch.float32, CPU),
        create(1, 60, Cell(1, 40, 32, is_latent=True), torch.float32, CPU),
        create(7, 21, Cell(2, 8, 8), torch.float32, CPU, False, window_map),
    ]
    launches: list[object] = []
    monkeypatch.setattr(launcher, lambda *arguments, **_: launches.append(arguments))
    slots = torch.arange(12).view(2, 6)
    LayerPools(pools, 60, torch.float32).move_kv_cache(slots[:, :3], slots[:, 3:])
    assert len(launches) == len(pools)
