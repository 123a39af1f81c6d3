import pytest
import torch

from cluster.batch import PageCopy
from cluster.config import ConfigError, EngineConfig
from cluster.kv.budget import page_count
from cluster.kv.pool import KVPool, Pools, slot_bytes

CPU = torch.device("cpu")


def test_a_move_reads_all_sources_before_it_writes() -> None:
    pool = KVPool(2, 6, 1, 2, torch.float64, CPU)
    pool.kv.copy_(torch.arange(6.0).view(1, 6, 1, 1, 1).expand_as(pool.kv))
    pool.move_kv_cache(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 1]))
    assert pool.kv[:, :, 0, 0, 0].tolist() == [[0, 2, 3, 1, 4, 5]] * 2


def test_bytes_of_a_slot_are_those_of_the_tensor() -> None:
    pool = KVPool(3, 8, 2, 4, torch.bfloat16, CPU)
    assert pool.kv.numel() * 2 == 8 * slot_bytes(3, 2, 4, torch.bfloat16)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_total_tokens": 100, "page_size": 16}, 6),
        ({"kv_cache_gb": 0.001, "page_size": 10}, 100),
        ({"max_running_requests": 2, "page_size": 1}, 2 * (64 + 5)),
    ],
)
def test_page_count(settings: dict[str, object], expected: int) -> None:
    config = EngineConfig(model_path="", **settings)
    assert page_count(config, token_bytes=1000, context_length=64, window=5) == expected


def test_too_little_memory_is_refused_by_name() -> None:
    config = EngineConfig(model_path="", max_total_tokens=16, page_size=16)
    with pytest.raises(ConfigError, match="raise max_total_tokens"):
        page_count(config, token_bytes=1, context_length=64, window=20)


def test_cells_of_a_page_are_copied_in_every_pool_before_any_is_overwritten() -> None:
    parts = [KVPool(layers, 16, 1, 2, torch.float64, CPU) for layers in (1, 3)]
    for pool in parts:
        pool.kv.copy_(torch.arange(16.0).view(1, 16, 1, 1, 1).expand_as(pool.kv))
    Pools(parts, 4, CPU).copy([PageCopy(1, 2, 3), PageCopy(2, 3, 2)])
    for pool in parts:
        slots = pool.kv[-1, :, 1, 0, 1].tolist()
        assert slots == [0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 11, 8, 9, 14, 15]
    Pools(parts, 4, CPU).copy([])
