"""The KV capacity of a rank, the text that explains it, and the errors when it does not fit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import local

import pytest

from cluster.arch.resolve import ResolvedConfig
from cluster.config import ConfigError, EngineConfig
from cluster.config.tree_shape import TreeShape
from cluster.distributed.mesh import Mesh
from cluster.kv import budget
from cluster.kv.budget import Capacity, MemoryBreakdown, kv_capacity, page_count
from cluster.kv.free_memory import free_memory
from cluster.kv.pool_sizes import PoolSizes
from tests.unit.dp_attention.threads import run_on_ranks

TOKEN = 1000  # KV bytes per token
SIZES = PoolSizes(EngineConfig(model_path="").page_size, TOKEN)
GB = 10**9


@pytest.fixture
def set_free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda free_bytes: monkeypatch.setattr(budget, "free_memory", lambda: free_bytes)


def resolved(context: int, window: int = 5, device: str = "cpu", **settings: object) -> ResolvedConfig:
    """Return the resolved config of an engine with `context` tokens and chains that take a window of `window` slots."""
    unused_fields = dict.fromkeys(
        ("target", "draft", "sample", "dtype", "kv_cache_dtype", "forced_rows", "steps_ahead")
    )
    config = EngineConfig(model_path="", **settings)
    facts = ResolvedConfig.from_settings(config, device=device, context_length=context, **unused_fields)
    return replace(facts, shape=TreeShape(num_steps=window - 1, topk=1, num_draft_tokens=window))


def capacity(context: int = 10**6, mesh: Mesh | None = None, **settings: object) -> Capacity:
    return kv_capacity(resolved(context, **settings), mesh or Mesh(), SIZES)


def test_explicit_kv_sizes_are_used_unchanged() -> None:
    assert capacity(max_total_tokens=100) == Capacity(100, "max_total_tokens")
    assert capacity(kv_cache_gb=0.001) == Capacity(1000, "kv_cache_gb 0.001")


def test_cpu_kv_capacity_is_a_share_of_free_memory(set_free_memory: Callable[[int], None]) -> None:
    set_free_memory(10 * GB)
    result = capacity()
    assert result.tokens == 3_000_000
    for expected_part in ("mem_fraction_static 0.3, the default, of the 10.0 GB free", "3.00 GB", "7.0 GB stay"):
        assert expected_part in result.sized_by
    assert capacity(mem_fraction_static=0.5).tokens == 5_000_000
    assert "default" not in capacity(mem_fraction_static=0.5).sized_by


def test_kv_capacity_is_limited_to_the_need_of_all_running_requests(set_free_memory: Callable[[int], None]) -> None:
    set_free_memory(10 * GB)
    for settings in ({}, {"kv_cache_gb": 1.0}):
        result = capacity(context=64, max_running_requests=2, **settings)
        assert result.tokens == 2 * 80, "64 tokens and a window of 5 take five pages of 16 per request"
        assert "2 requests at the full context of 64 tokens" in result.sized_by


def gang_capacities(machine_ids: list[int], free_bytes: list[int], monkeypatch: pytest.MonkeyPatch) -> list[Capacity]:
    """Return the KV capacities of ranks: rank r runs on machine `machine_ids[r]`, which has `free_bytes[r]` free."""
    current = local()
    monkeypatch.setattr(budget, "free_memory", lambda: free_bytes[current.rank])
    monkeypatch.setattr(budget, "_machine_id", lambda: machine_ids[current.rank])

    def rank_capacity(mesh: Mesh) -> Capacity:
        current.rank = mesh.rank
        return capacity(mesh=mesh)

    return run_on_ranks(len(machine_ids), 1, rank_capacity)


def test_ranks_on_one_machine_share_memory_and_agree_on_the_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    capacities = gang_capacities([7, 7, 8], [10 * GB, 10 * GB, 4 * GB], monkeypatch)
    assert [rank_capacity.tokens for rank_capacity in capacities] == [1_200_000] * 3, (
        "rank 2: 0.3 of 4 GB; others: half of 0.3 of 10"
    )
    assert "for each of 2 ranks" in capacities[0].sized_by
    assert "the rank with the least room" in capacities[0].sized_by
    assert "the rank with the least room" not in capacities[2].sized_by


MEMORY = MemoryBreakdown(total=100 * GB, free=70 * GB, weights=25 * GB, workspace=8 * GB, graphs=2 * GB)


def device_capacity(memory: MemoryBreakdown = MEMORY, context: int = 10**8, **settings: object) -> Capacity:
    return kv_capacity(resolved(context, device="cuda", **settings), Mesh(), SIZES, memory)


def test_device_kv_capacity_is_the_remaining_memory_minus_the_sink_page() -> None:
    result = device_capacity()
    assert result.tokens == 59_000_000 - 16, "70 - 8 - 2 - 1 GB spare (a tenth of 8 would be less)"
    for expected_part in (
        "weights take 25.000",
        "others 5.000",
        "workspaces 8.000, captured programs 2.000",
        "1.000 stay spare",
    ):
        assert expected_part in result.sized_by
    assert device_capacity(MEMORY._replace(workspace=20 * GB)).tokens == 46_000_000 - 16, "a tenth of 20 GB is spare"
    assert device_capacity(context=64, max_running_requests=2).tokens == 160


@pytest.mark.parametrize(
    ("setting", "largest_value", "expected_tokens", "suggested_value"),
    [
        ("max_total_tokens", 59_499_984, 59_499_984, "58409984"),
        ("kv_cache_gb", 59.4999, 59_499_900, "58.4099"),
        ("mem_fraction_static", 0.845, 59_500_000 - 16, "0.8341"),
    ],
)
def test_device_kv_setting_that_does_not_fit_is_refused_with_a_fitting_value(
    setting: str, largest_value: float, expected_tokens: int, suggested_value: str
) -> None:
    assert device_capacity(**{setting: largest_value}).tokens == pytest.approx(expected_tokens, abs=1)
    too_large = largest_value + (1 if setting == "max_total_tokens" else 0.01)
    with pytest.raises(ConfigError, match=rf"lower {setting} to {suggested_value},") as raised:
        device_capacity(**{setting: too_large})
    assert "59.000 GB are left for it (of 100.000 GB weights take 25.000" in str(raised.value)


def test_mem_fraction_static_covers_weights_and_kv_together() -> None:
    result = device_capacity(mem_fraction_static=0.5)
    assert result.tokens == 25_000_000 - 16, "half of 100 GB, minus 25 GB of weights"
    assert "mem_fraction_static 0.5 of 100.0 GB less 25.0 GB of weights" in result.sized_by


def test_each_gang_on_a_shared_device_gets_its_own_memory_fraction() -> None:
    """The first gang has taken 45 of 100 GB when the second gang, with as large a fraction, has loaded."""
    memory_of_second_gang = MEMORY._replace(free=30 * GB)
    assert device_capacity(memory_of_second_gang, mem_fraction_static=0.4).tokens == 15_000_000 - 16
    with pytest.raises(ConfigError, match=r"25.000 GB, and 19.000 .* lower mem_fraction_static to 0.4"):
        device_capacity(memory_of_second_gang, mem_fraction_static=0.5)


def test_restart_gets_the_first_kv_size_with_slightly_less_free_memory() -> None:
    first_tokens = device_capacity().tokens
    assert (
        device_capacity(MEMORY._replace(free=70 * GB - 400_000_000), max_total_tokens=first_tokens).tokens
        == first_tokens
    )
    with pytest.raises(ConfigError, match=r"lower max_total_tokens"):
        device_capacity(MEMORY._replace(free=70 * GB - 600_000_000), max_total_tokens=first_tokens)


def test_models_that_leave_no_memory_for_kv_are_refused(set_free_memory: Callable[[int], None]) -> None:
    set_free_memory(0)
    with pytest.raises(ConfigError, match=r"mem_fraction_static 0.3.*too few.*free memory"):
        page_count(resolved(64), capacity())


@pytest.mark.parametrize(("tokens", "page_size", "expected_pages"), [(100, 16, 6), (1000, 10, 100), (138, 1, 138)])
def test_page_count_rounds_tokens_down_to_full_pages(tokens: int, page_size: int, expected_pages: int) -> None:
    assert page_count(resolved(64, page_size=page_size), Capacity(tokens, "")) == expected_pages


def test_kv_capacity_below_one_window_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="raise max_total_tokens"):
        page_count(resolved(64, window=20), Capacity(16, "max_total_tokens"))


KB = 1024
MEMINFO = "MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable: 50 kB\n"


def free_memory_with_files(root: Path, files: dict[str, str]) -> int:
    """Write /proc/meminfo and `files` below `root`; return the free memory that they describe."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return free_memory(root)


def test_free_memory_without_cgroups_is_mem_available(tmp_path: Path) -> None:
    assert free_memory_with_files(tmp_path, {}) == 50 * KB


def test_free_memory_respects_cgroup_v2_limits_at_every_level(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pods/one"
    files = {
        "proc/self/cgroup": "0::/pods/one\n",
        f"{group}/memory.max": "max\n",
        f"{group}/memory.current": "9000\n",
        f"{group}/memory.stat": "anon 1\n",
        "sys/fs/cgroup/pods/memory.max": "20000\n",
        "sys/fs/cgroup/pods/memory.current": "9000\n",
        "sys/fs/cgroup/pods/memory.stat": "anon 1\nactive_file 1000\ninactive_file 500\n",
    }
    assert free_memory_with_files(tmp_path, files) == 20000 - 9000 + 1500, "the file cache counts as free"


def test_free_memory_respects_cgroup_v1_limits_in_a_container(tmp_path: Path) -> None:
    cgroup_folder = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "12:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n",
        f"{cgroup_folder}/memory.limit_in_bytes": "30000\n",
        f"{cgroup_folder}/memory.usage_in_bytes": "29000\n",
        f"{cgroup_folder}/memory.stat": "total_inactive_file 200\n",
    }
    assert free_memory_with_files(tmp_path, files) == 1200
    assert free_memory_with_files(tmp_path, {f"{cgroup_folder}/memory.limit_in_bytes": f"{2**63 - 4096}\n"}) == 50 * KB
    assert free_memory_with_files(tmp_path, {f"{cgroup_folder}/memory.limit_in_bytes": "100\n"}) == 0


def test_unknown_free_memory_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set max_total_tokens"):
        free_memory(tmp_path)


def test_free_memory_of_this_machine_is_positive() -> None:
    assert 0 < free_memory() < 2**50
