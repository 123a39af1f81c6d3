"""How long shards may load: as long as one of them shows progress, and not beyond the time that there is."""

import asyncio
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.actors.gang import Gang
from cluster.actors.incarnation import GangSpec, GangStartError, Incarnation
from cluster.actors.messages import Heartbeat
from cluster.actors.placement import layout_of
from cluster.config import ConfigError, EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.kv.budget import Capacity, page_count
from tests.info import rank_info


def life() -> Incarnation:
    spec = GangSpec(EngineConfig(model_path="m"), layout_of(2, bundle_per_worker={"CPU": 1}), "test/by-hand")
    made = Incarnation(spec, None, 0)  # type: ignore[arg-type]
    made._answered_at = [time.monotonic()] * 2
    return made


def load(made: Incarnation, *loads: Any, time_s: float, still_s: float, progress: bool = False) -> list[Any]:
    async def working() -> None:
        while True:
            made.heartbeats[1] = Heartbeat(1, 0, True, 0.0, 0, "load")
            made._answered_at[1] = time.monotonic()
            await asyncio.sleep(0.05)

    async def whole() -> list[Any]:
        worker = asyncio.create_task(working()) if progress else None
        try:
            return await made._await_loads([done() for done in loads], time.monotonic() + time_s, still_s)
        finally:
            if worker is not None:
                worker.cancel()

    return asyncio.run(whole())


async def never() -> None:
    await asyncio.Event().wait()


async def soon() -> int:
    await asyncio.sleep(1.5)
    return 7


async def refuses() -> None:
    raise ConfigError("model_path: no such folder")


def test_reports_against_a_loading_rank_are_cleared_once_the_incarnation_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A heartbeat may be lost on the way to a rank that lives."""

    async def loaded(loads: Any, *_: Any) -> list[Any]:
        for load in loads:
            load.close()
        made.mark_dead(1, RuntimeError("unavailable for a moment"))
        made.mark_failed(0, "its heartbeat failed")
        return [rank_info()] * 2

    async def follow(rank: int) -> None:
        await never()

    async def whole() -> None:
        await made.begin(30)
        assert not made.alarm.is_set() and not any(sign.death or sign.failure for sign in made.evidence())
        made._cancel_watchers()

    made = life()
    call = SimpleNamespace(remote=lambda *_: None)
    shard = SimpleNamespace(open_store=call, load=call)
    for name, instead in {"_create": lambda rank: shard, "_await_loads": loaded, "_watch_end": follow}.items():
        monkeypatch.setattr(made, name, instead)
    asyncio.run(whole())


def test_load_continues_past_the_stall_limit_while_one_rank_progresses() -> None:
    assert load(life(), soon, soon, time_s=30, still_s=0.5, progress=True) == [7, 7]


def test_load_fails_when_no_rank_shows_progress() -> None:
    with pytest.raises(GangStartError, match="rank 0, 1 did not load: no rank has done anything for"):
        load(life(), never, never, time_s=30, still_s=0.5)


def test_load_fails_at_the_start_timeout_despite_progress() -> None:
    with pytest.raises(GangStartError, match=r"rank 1 did not load within \d+ s; raise start_timeout_s if"):
        load(life(), soon, never, time_s=2.0, still_s=0.5, progress=True)


def test_load_raises_config_error_of_a_rank_immediately() -> None:
    with pytest.raises(ConfigError, match="model_path"):
        load(life(), never, refuses, time_s=30, still_s=30)


@pytest.mark.parametrize(
    ("given", "start_s", "patience_s"), [(None, 0.0, 60.0), (None, 10.0, 60.0), (None, 90.0, 360.0), (6.0, 90.0, 6.0)]
)
def test_restart_timeout_is_the_setting_or_scales_with_the_first_start(
    given: float | None, start_s: float, patience_s: float
) -> None:
    config = EngineConfig(model_path="m", restart_timeout_s=given)
    gang = Gang(GangSpec(config, layout_of(1, bundle_per_worker={"CPU": 1}), "test/by-hand"))
    gang._start_s = start_s
    assert gang.restart_timeout_s == gang.history().restart_timeout_s == patience_s


def test_restarted_incarnation_keeps_the_kv_size_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much memory is free by then: streams that are open have to fit again."""
    begun: list[GangSpec] = []

    class Loaded:
        def __init__(self, spec: GangSpec, *_: object) -> None:
            begun.append(spec)
            size = spec.config.max_total_tokens
            by = "max_total_tokens" if size else f"mem_fraction_static {spec.config.mem_fraction_static}"
            self.infos = [rank_info(kv_tokens=size or 4096, kv_sized_by=by) for _ in range(2)]

        async def begin(self, timeout_s: float, still_s: float) -> None: ...

    monkeypatch.setattr("cluster.actors.gang.Incarnation", Loaded)
    config = EngineConfig(model_path="m", page_size=16, mem_fraction_static=0.5)
    gang = Gang(GangSpec(config, layout_of(2, bundle_per_worker={"CPU": 1}), "test/by-hand"))
    gang._placement = object()  # type: ignore[assignment]
    for _ in range(3):
        asyncio.run(gang._begin(1.0))
    assert begun[0].config is config and gang.spec.config is config
    for spec in begun[1:]:
        assert EngineConfig.model_validate(spec.config.model_dump()) == spec.config, "one size, not two"
        assert (
            page_count(ResolvedSettings.from_settings(spec.config), Capacity(4096, "")) * 16
            == spec.config.max_total_tokens
            == 4096
        )
    assert [info.kv_sized_by for info in gang.infos] == ["mem_fraction_static 0.5"] * 2


def test_one_rank_per_node_downloads_the_model_before_any_rank_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []

    def shard(rank: int) -> Any:
        async def call(name: str, answer: Any) -> Any:
            done.append((name, rank))
            return answer

        calls = {"fetch": None, "load": rank_info(), "open_store": ("127.0.0.1", 1)}
        return SimpleNamespace(
            **{name: SimpleNamespace(remote=partial(lambda n, a, *_: call(n, a), name, a)) for name, a in calls.items()}
        )

    async def follow(rank: int) -> None:
        await never()

    async def whole(model: str) -> list[tuple[str, int]]:
        done.clear()
        config = EngineConfig(model_path=model, tp_size=4)
        spec = GangSpec(config, layout_of(4, bundle_per_worker={"CPU": 1}), "test/by-hand")
        made = Incarnation(spec, SimpleNamespace(node_of_rank=("a", "a", "b", "b")), 0)  # type: ignore[arg-type]
        for name, instead in {"_create": shard, "_watch_end": follow, "request_heartbeats": list}.items():
            monkeypatch.setattr(made, name, instead)
        await made.begin(30)
        made._cancel_watchers()
        return done

    pinned = f"hf://org/model@main#{'0' * 40}"
    assert asyncio.run(whole(pinned))[:3] == [("fetch", 0), ("fetch", 2), ("open_store", 0)]
    assert [rank for name, rank in done if name == "load"] == [0, 1, 2, 3]
    assert asyncio.run(whole("/a/folder"))[0] == ("open_store", 0)
