"""How much KV a rank gets, and what is said about it."""

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
from tests.unit.dp_attention.threads import on_ranks

TOKEN = 1000  # bytes
GB = 10**9


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda given: monkeypatch.setattr(budget, "free_memory", lambda: given)


def resolved(context: int, window: int = 5, device: str = "cpu", **settings: object) -> ResolvedConfig:
    """The facts of an engine whose chains take a window of so many slots."""
    unread = dict.fromkeys(("target", "draft", "sample", "dtype", "kv_cache_dtype", "forced_rows", "steps_ahead"))
    config = EngineConfig(model_path="", **settings)
    facts = ResolvedConfig.from_settings(config, device=device, context_length=context, **unread)
    return replace(facts, shape=TreeShape(num_steps=window - 1, topk=1, num_draft_tokens=window))


def capacity(context: int = 10**6, mesh: Mesh | None = None, **settings: object) -> Capacity:
    return kv_capacity(resolved(context, **settings), mesh or Mesh(), TOKEN)


def test_explicit_kv_sizes_are_used_unchanged() -> None:
    assert capacity(max_total_tokens=100) == Capacity(100, "max_total_tokens")
    assert capacity(kv_cache_gb=0.001) == Capacity(1000, "kv_cache_gb 0.001")


def test_cpu_kv_capacity_is_a_share_of_free_memory(free: Callable[[int], None]) -> None:
    free(10 * GB)
    found = capacity()
    assert found.tokens == 3_000_000
    for words in ("mem_fraction_static 0.3, the default, of the 10.0 GB free", "3.00 GB", "7.0 GB stay"):
        assert words in found.sized_by
    assert capacity(mem_fraction_static=0.5).tokens == 5_000_000
    assert "default" not in capacity(mem_fraction_static=0.5).sized_by


def test_kv_capacity_is_limited_to_the_need_of_all_running_requests(free: Callable[[int], None]) -> None:
    free(10 * GB)
    for settings in ({}, {"kv_cache_gb": 1.0}):
        found = capacity(context=64, max_running_requests=2, **settings)
        assert found.tokens == 2 * 80, "five pages of 16 each, of which 64 and a window of 5 fill four and a part"
        assert "2 requests at the full context of 64 tokens" in found.sized_by


def of_gang(places: list[int], free: list[int], monkeypatch: pytest.MonkeyPatch) -> list[Capacity]:
    """What ranks on these machines find that see so much free memory each."""
    here = local()
    monkeypatch.setattr(budget, "free_memory", lambda: free[here.rank])
    monkeypatch.setattr(budget, "_machine_id", lambda: places[here.rank])

    def rank(mesh: Mesh) -> Capacity:
        here.rank = mesh.rank
        return capacity(mesh=mesh)

    return on_ranks(len(places), 1, rank)


def test_ranks_on_one_machine_share_memory_and_agree_on_the_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    found = of_gang([7, 7, 8], [10 * GB, 10 * GB, 4 * GB], monkeypatch)
    assert [one.tokens for one in found] == [1_200_000] * 3, "0.3 of 4 GB on the third, half of 0.3 of 10 on the others"
    assert "for each of 2 ranks" in found[0].sized_by
    assert "the rank with the least room" in found[0].sized_by
    assert "the rank with the least room" not in found[2].sized_by


NEEDS = MemoryBreakdown(total=100 * GB, free=70 * GB, weights=25 * GB, workspace=8 * GB, graphs=2 * GB)


def of_device(needs: MemoryBreakdown = NEEDS, context: int = 10**8, **settings: object) -> Capacity:
    return kv_capacity(resolved(context, device="cuda", **settings), Mesh(), TOKEN, needs)


def test_device_kv_capacity_is_the_remaining_memory_minus_the_sink_page() -> None:
    found = of_device()
    assert found.tokens == 59_000_000 - 16, "70 less 8, 2, and 1 that stays spare: more than a tenth of 8"
    for words in (
        "weights take 25.000",
        "others 5.000",
        "workspaces 8.000, captured programs 2.000",
        "1.000 stay spare",
    ):
        assert words in found.sized_by
    assert of_device(NEEDS._replace(workspace=20 * GB)).tokens == 46_000_000 - 16, "a tenth of 20 is more"
    assert of_device(context=64, max_running_requests=2).tokens == 160


@pytest.mark.parametrize(
    ("setting", "fits", "tokens", "told"),
    [
        ("max_total_tokens", 59_499_984, 59_499_984, "58409984"),
        ("kv_cache_gb", 59.4999, 59_499_900, "58.4099"),
        ("mem_fraction_static", 0.845, 59_500_000 - 16, "0.8341"),
    ],
)
def test_device_kv_setting_that_does_not_fit_is_refused_with_a_fitting_value(
    setting: str, fits: float, tokens: int, told: str
) -> None:
    assert of_device(**{setting: fits}).tokens == pytest.approx(tokens, abs=1)
    more = fits + (1 if setting == "max_total_tokens" else 0.01)
    with pytest.raises(ConfigError, match=rf"lower {setting} to {told},") as refused:
        of_device(**{setting: more})
    assert "59.000 GB are left for it (of 100.000 GB weights take 25.000" in str(refused.value)


def test_mem_fraction_static_covers_weights_and_kv_together() -> None:
    found = of_device(mem_fraction_static=0.5)
    assert found.tokens == 25_000_000 - 16, "half of 100 less 25 of weights"
    assert "mem_fraction_static 0.5 of 100.0 GB less 25.0 GB of weights" in found.sized_by


def test_each_gang_on_a_shared_device_gets_its_own_memory_fraction() -> None:
    """The first has taken 45 of 100 when the second, whose fraction is as large, has loaded."""
    second = NEEDS._replace(free=30 * GB)
    assert of_device(second, mem_fraction_static=0.4).tokens == 15_000_000 - 16
    with pytest.raises(ConfigError, match=r"25.000 GB, and 19.000 .* lower mem_fraction_static to 0.4"):
        of_device(second, mem_fraction_static=0.5)


def test_restart_gets_the_first_kv_size_with_slightly_less_free_memory() -> None:
    first = of_device().tokens
    assert of_device(NEEDS._replace(free=70 * GB - 400_000_000), max_total_tokens=first).tokens == first
    with pytest.raises(ConfigError, match=r"lower max_total_tokens"):
        of_device(NEEDS._replace(free=70 * GB - 600_000_000), max_total_tokens=first)


def test_models_that_leave_no_memory_for_kv_are_refused(free: Callable[[int], None]) -> None:
    free(0)
    with pytest.raises(ConfigError, match=r"mem_fraction_static 0.3.*too few.*free memory"):
        page_count(resolved(64), capacity())


@pytest.mark.parametrize(("tokens", "size", "pages"), [(100, 16, 6), (1000, 10, 100), (138, 1, 138)])
def test_page_count_rounds_tokens_down_to_full_pages(tokens: int, size: int, pages: int) -> None:
    assert page_count(resolved(64, page_size=size), Capacity(tokens, "")) == pages


def test_kv_capacity_below_one_window_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="raise max_total_tokens"):
        page_count(resolved(64, window=20), Capacity(16, "max_total_tokens"))


KB = 1024
MEMINFO = "MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable: 50 kB\n"


def machine(root: Path, files: dict[str, str]) -> int:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return free_memory(root)


def test_free_memory_without_cgroups_is_mem_available(tmp_path: Path) -> None:
    assert machine(tmp_path, {}) == 50 * KB


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
    assert machine(tmp_path, files) == 20000 - 9000 + 1500, "file cache can be taken back"


def test_free_memory_respects_cgroup_v1_limits_in_a_container(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "12:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n",
        f"{top}/memory.limit_in_bytes": "30000\n",
        f"{top}/memory.usage_in_bytes": "29000\n",
        f"{top}/memory.stat": "total_inactive_file 200\n",
    }
    assert machine(tmp_path, files) == 1200
    assert machine(tmp_path, {f"{top}/memory.limit_in_bytes": f"{2**63 - 4096}\n"}) == 50 * KB
    assert machine(tmp_path, {f"{top}/memory.limit_in_bytes": "100\n"}) == 0


def test_unknown_free_memory_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set max_total_tokens"):
        free_memory(tmp_path)


def test_free_memory_of_this_machine_is_positive() -> None:
    assert 0 < free_memory() < 2**50
