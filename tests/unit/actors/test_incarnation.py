"""The start of an incarnation: shards may load while any rank makes progress and until the timeout; restarts too."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.actors.gang import Gang
from cluster.actors.incarnation import LOAD_CHECK_PERIOD_S, REASON_TIMEOUT_S, GangSpec, GangStartError, Incarnation
from cluster.actors.messages import Heartbeat
from cluster.actors.placement import layout_of
from cluster.config import ConfigError, EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.kv.budget import Capacity, page_count
from tests.support.rank_info import rank_info
from tests.support.simulated_time import SimulatedTimeLoop

LOAD_S = 1.5


def new_incarnation() -> Incarnation:
    spec = GangSpec(EngineConfig(model_path="m"), layout_of(2, bundle_per_worker={"CPU": 1}), "test/by-hand")
    return Incarnation(spec, None, 0)  # type: ignore[arg-type]


def await_loads(
    *loads: Any, time_s: float, stall_timeout_s: float, progress: bool = False
) -> tuple[list[Any] | Exception, float]:
    """Return the answers or the error of the loads, and the simulated seconds until then."""
    incarnation = new_incarnation()

    async def report_progress() -> None:
        while True:
            incarnation.heartbeats[1] = Heartbeat(1, 0, True, 0.0, 0, "load")
            incarnation._answered_at[1] = asyncio.get_running_loop().time()
            await asyncio.sleep(0.05)

    async def run_loads() -> list[Any] | Exception:
        progress_task = asyncio.create_task(report_progress()) if progress else None
        try:
            return await incarnation._await_loads([load_call() for load_call in loads], time_s, stall_timeout_s)
        except (GangStartError, ConfigError) as error:
            return error
        finally:
            if progress_task is not None:
                progress_task.cancel()

    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner, pytest.MonkeyPatch.context() as patch:
        clock = runner.get_loop().time
        patch.setattr("cluster.actors.incarnation.time", SimpleNamespace(monotonic=clock))
        incarnation._answered_at = [clock()] * 2
        return runner.run(run_loads()), clock()


async def never_loads() -> None:
    await asyncio.Event().wait()


async def loads_soon() -> int:
    await asyncio.sleep(LOAD_S)
    return 7


async def refuses_config() -> None:
    raise ConfigError("model_path: no such folder")


def test_reports_against_a_loading_rank_are_cleared_once_the_incarnation_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A heartbeat call may fail although its rank is alive."""

    async def finish_loads(loads: Any, *_: Any) -> list[Any]:
        for load_call in loads:
            load_call.close()
        incarnation.mark_dead(1, RuntimeError("unavailable for a moment"))
        incarnation.mark_failed(0, "its heartbeat failed")
        return [rank_info()] * 2

    async def watch_forever(rank: int) -> None:
        await never_loads()

    async def begin_incarnation() -> None:
        await incarnation.begin(30)
        assert not incarnation.alarm.is_set() and not any(
            rank_evidence.death or rank_evidence.failure for rank_evidence in incarnation.evidence()
        )
        incarnation._cancel_watchers()

    incarnation = new_incarnation()
    no_op_call = SimpleNamespace(remote=lambda *_: None)
    shard = SimpleNamespace(open_store=no_op_call, load=no_op_call)
    for name, replacement in {
        "_create": lambda rank: shard,
        "_await_loads": finish_loads,
        "_watch_end": watch_forever,
    }.items():
        monkeypatch.setattr(incarnation, name, replacement)
    asyncio.run(begin_incarnation())


def test_load_continues_past_the_stall_limit_while_one_rank_progresses() -> None:
    answers, seconds = await_loads(loads_soon, loads_soon, time_s=30, stall_timeout_s=0.5, progress=True)
    assert answers == [7, 7] and seconds == pytest.approx(LOAD_S, abs=0.01)


def test_load_fails_when_no_rank_shows_progress() -> None:
    error, seconds = await_loads(never_loads, never_loads, time_s=30, stall_timeout_s=0.5)
    assert "rank 0, 1 did not load: no rank has done anything for" in str(error)
    assert isinstance(error, GangStartError) and 0.5 < seconds < 0.51 + LOAD_CHECK_PERIOD_S


def test_load_fails_at_the_start_timeout_despite_progress() -> None:
    error, seconds = await_loads(loads_soon, never_loads, time_s=20, stall_timeout_s=0.5, progress=True)
    assert "rank 1 did not load within 20 s; raise start_timeout_s if" in str(error)
    assert isinstance(error, GangStartError) and seconds == pytest.approx(20, abs=0.1)


def test_load_raises_config_error_of_a_rank_soon() -> None:
    error, seconds = await_loads(never_loads, refuses_config, time_s=30, stall_timeout_s=30)
    assert isinstance(error, ConfigError) and "model_path" in str(error) and seconds < REASON_TIMEOUT_S + 0.01


@pytest.mark.parametrize(
    ("setting_s", "first_start_s", "expected_timeout_s"),
    [(None, 0.0, 60.0), (None, 10.0, 60.0), (None, 90.0, 360.0), (6.0, 90.0, 6.0)],
)
def test_restart_timeout_is_the_setting_or_scales_with_the_first_start(
    setting_s: float | None, first_start_s: float, expected_timeout_s: float
) -> None:
    config = EngineConfig(model_path="m", restart_timeout_s=setting_s)
    gang = Gang(GangSpec(config, layout_of(1, bundle_per_worker={"CPU": 1}), "test/by-hand"))
    gang._start_s = first_start_s
    assert gang.restart_timeout_s == gang.history().restart_timeout_s == expected_timeout_s


def test_restarted_incarnation_keeps_the_kv_size_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV size must not depend on the memory that is free at the restart: all open streams must fit again."""
    begun_specs: list[GangSpec] = []

    class LoadedIncarnation:
        def __init__(self, spec: GangSpec, *_: object) -> None:
            begun_specs.append(spec)
            size = spec.config.max_total_tokens
            sized_by = "max_total_tokens" if size else f"mem_fraction_static {spec.config.mem_fraction_static}"
            self.infos = [rank_info(kv_tokens=size or 4096, kv_sized_by=sized_by) for _ in range(2)]

        async def begin(self, timeout_s: float, still_s: float) -> None: ...

    monkeypatch.setattr("cluster.actors.gang.Incarnation", LoadedIncarnation)
    config = EngineConfig(model_path="m", page_size=16, mem_fraction_static=0.5)
    gang = Gang(GangSpec(config, layout_of(2, bundle_per_worker={"CPU": 1}), "test/by-hand"))
    gang._placement = object()  # type: ignore[assignment]
    for _ in range(3):
        asyncio.run(gang._begin(1.0))
    assert begun_specs[0].config is config and gang.spec.config is config
    for spec in begun_specs[1:]:
        assert EngineConfig.model_validate(spec.config.model_dump()) == spec.config, "two KV sizes set"
        assert (
            page_count(ResolvedSettings.from_settings(spec.config), Capacity(4096, "")) * 16
            == spec.config.max_total_tokens
            == 4096
        )
    assert [info.kv_sized_by for info in gang.infos] == ["mem_fraction_static 0.5"] * 2


def test_one_rank_per_node_downloads_the_model_before_any_rank_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_calls: list[tuple[str, int]] = []

    def fake_shard(rank: int) -> Any:
        async def record_call(name: str, answer: Any) -> Any:
            recorded_calls.append((name, rank))
            return answer

        replies = {"fetch": None, "load": rank_info(), "open_store": ("127.0.0.1", 1)}
        return SimpleNamespace(
            **{
                name: SimpleNamespace(remote=partial(lambda method, reply, *_: record_call(method, reply), name, reply))
                for name, reply in replies.items()
            }
        )

    async def watch_forever(rank: int) -> None:
        await never_loads()

    async def begin_incarnation(model: str) -> list[tuple[str, int]]:
        recorded_calls.clear()
        config = EngineConfig(model_path=model, tp_size=4)
        spec = GangSpec(config, layout_of(4, bundle_per_worker={"CPU": 1}), "test/by-hand")
        incarnation = Incarnation(spec, SimpleNamespace(node_of_rank=("a", "a", "b", "b")), 0)  # type: ignore[arg-type]
        for name, replacement in {
            "_create": fake_shard,
            "_watch_end": watch_forever,
            "request_heartbeats": list,
        }.items():
            monkeypatch.setattr(incarnation, name, replacement)
        await incarnation.begin(30)
        incarnation._cancel_watchers()
        return recorded_calls

    pinned = f"hf://org/model@main#{'0' * 40}"
    assert asyncio.run(begin_incarnation(pinned))[:3] == [("fetch", 0), ("fetch", 2), ("open_store", 0)]
    assert [rank for name, rank in recorded_calls if name == "load"] == [0, 1, 2, 3]
    assert asyncio.run(begin_incarnation("/a/folder"))[0] == ("open_store", 0)
