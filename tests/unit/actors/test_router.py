"""The router over a gang by hand: what its tasks do when something unforeseen happens, and what it says then."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.actors.incarnation import GangSpec
from cluster.actors.messages import Commands, Loss, Overloaded, StepItem, Unavailable
from cluster.actors.placement import layout_of
from cluster.actors.router import Router, _step_times_of
from cluster.config import EngineConfig
from cluster.request import Request, RequestParams, SequenceOutput
from cluster.status import EngineStatus, RankInfo, StepCosts
from tests.info import rank_info

LOSS = Loss(0, "died", 7, "target", "the process died", 0, 0.0, 0.1)
Said = asyncio.Queue[Any]


class Life:
    """A life of one rank: what is put to it is kept, what it says is put in `said`; an exception ends its stream."""

    def __init__(self, spec: GangSpec, taking: Callable[[Commands], None]) -> None:
        self.spec, self.taken, self.failed = spec, [], ""  # type: ignore[var-annotated]
        self.said: Said = asyncio.Queue()
        self.made_progress = False
        self.status: EngineStatus | None = None
        self._taking = taking
        self.shards = [SimpleNamespace(put=SimpleNamespace(remote=self._put))]

    async def _put(self, commands: Commands) -> None:
        self._taking(commands)
        self.taken += [request.request_id for request in commands.submits]

    async def open_stream(self, rank: int) -> AsyncIterator[Any]:
        while (item := await self.said.get()) is not None:
            if isinstance(item, Exception):
                raise item
            ref: asyncio.Future[tuple[StepItem, ...]] = asyncio.Future()
            ref.set_result((item,))
            yield ref

    def mark_alive(self) -> None:
        return

    def last_status(self, rank: int) -> tuple[float, EngineStatus] | None:
        return None if self.status is None else (1e9, self.status)

    def mark_dead(self, rank: int, error: Exception) -> None:
        self.failed = f"dead: {error}"

    def mark_failed(self, rank: int, reason: str) -> None:
        self.failed = reason


class Gang:
    def __init__(self) -> None:
        config = EngineConfig(model_path="m", page_size=4)
        self.spec = GangSpec(config, layout_of(1, bundle_per_worker={"CPU": 1}), "test/by-hand")
        self.infos: list[RankInfo] = []
        self.start_s, self.lost_reason = 12.3, ""
        self.taking: Callable[[Commands], None] = lambda commands: None
        self.incarnation: Any = None

    def begin(self) -> Life:
        self.infos = [rank_info(page_size=4, kv_pages=30)]
        self.incarnation = Life(self.spec, self.taking)
        return self.incarnation

    async def watch(self, owner: Any) -> None:
        await asyncio.Event().wait()


def ask(name: str, prompt: int = 9) -> Request:
    return Request(name, tuple(range(prompt)), RequestParams(max_tokens=4))


async def read(router: Router, request: Request) -> list[SequenceOutput]:
    return [output async for output in router.generate(request)]


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("waited in vain")


def with_router(body: Callable[[Router, Gang], Any]) -> None:
    async def whole() -> None:
        gang = Gang()
        router = Router(gang)  # type: ignore[arg-type]
        gang.begin()
        router.start()
        try:
            await body(router, gang)
        finally:
            await router.close()

    asyncio.run(whole())


def outputs(step: int, *names: str, ended: bool = False) -> StepItem:
    finish = "length" if ended else None
    return StepItem(0, step, tuple(SequenceOutput(name, (step,), finish_reason=finish) for name in names))  # type: ignore[arg-type]


def test_router_marks_the_rank_failed_when_sending_commands_raises() -> None:
    async def body(router: Router, gang: Gang) -> None:
        def refuses(commands: Commands) -> None:
            raise TypeError("cannot pickle")

        gang.incarnation._taking = refuses
        task = asyncio.create_task(read(router, ask("a")))
        await until(lambda: gang.incarnation.failed)
        assert "its commands failed: cannot pickle" in gang.incarnation.failed
        await router.on_down(LOSS)
        life = gang.begin()
        router.on_up()
        await until(lambda: life.taken == ["a"])
        life.said.put_nowait(outputs(1, "a", ended=True))
        assert (await task)[-1].finish_reason == "length"

    with_router(body)


@pytest.mark.parametrize("item", [KeyError("what"), SimpleNamespace(nothing=1)], ids=["the stream", "the item"])
def test_router_marks_the_rank_failed_when_reading_outputs_raises(item: Any) -> None:
    async def body(router: Router, gang: Gang) -> None:
        task = asyncio.create_task(read(router, ask("a")))
        await until(lambda: gang.incarnation.taken)
        gang.incarnation.said.put_nowait(item)
        await until(lambda: gang.incarnation.failed)
        assert "its outputs failed" in gang.incarnation.failed
        task.cancel()

    with_router(body)


def test_outputs_before_a_loss_count_and_only_the_fatal_step_is_suspect() -> None:
    async def body(router: Router, gang: Gang) -> None:
        first = gang.incarnation
        names = [f"s{i}" for i in range(116)]
        tasks = [asyncio.create_task(read(router, ask(name))) for name in names]
        await until(lambda: len(first.taken) == 116)
        first.said.put_nowait(StepItem(0, 0, admitted=tuple(names[:16])))
        for _ in range(2):
            assert not first.made_progress, "their prompts alone are no proof that steps work"
            first.said.put_nowait(outputs(1, *names[:16]))
            await until(first.said.empty)
        first.said.put_nowait(StepItem(0, 1, admitted=("s20",)))  # the fatal step
        first.said.put_nowait(None)
        await router.on_down(LOSS)
        assert [s.name for s in router._streams.values() if s.in_fatal_step] == ["s20"] and first.made_progress
        second = gang.begin()
        router.on_up()
        late = asyncio.create_task(read(router, ask("late")))
        await until(lambda: len(second.taken) == 117)
        assert second.taken == [*names, "late"]  # those that had tokens are the first sixteen; one call for all
        for task in (*tasks, late):
            task.cancel()

    with_router(body)


def test_stream_resumed_from_another_replica_bypasses_admission_limits() -> None:
    async def body(router: Router, gang: Gang) -> None:
        router._admission._config = gang.spec.config.model_copy(update={"max_queued_requests": 1})
        tasks = [asyncio.create_task(read(router, ask("first")))]
        await until(lambda: gang.incarnation.taken)
        with pytest.raises(Overloaded):
            await read(router, ask("new"))
        tasks.append(asyncio.create_task(read(router, replace(ask("resumed"), resumed_tokens=3))))
        await until(lambda: gang.incarnation.taken == ["first", "resumed"])
        for task in tasks:
            task.cancel()

    with_router(body)


def test_started_stream_that_the_engine_refuses_ends_with_finish_reason_error() -> None:
    """Not with one of the request, which the client could have been told of before."""

    async def body(router: Router, gang: Gang) -> None:
        task = asyncio.create_task(read(router, ask("a")))
        await until(lambda: gang.incarnation.taken)
        gang.incarnation.said.put_nowait(outputs(1, "a"))
        gang.incarnation.said.put_nowait(StepItem(0, 1, refused=(("a", "no grammar"),)))
        last = (await task)[-1]
        assert (last.finish_reason, last.error) == ("error", "the engine would not resume it: no grammar")

    with_router(body)


def test_lost_gang_aborts_its_streams_and_refuses_new_requests() -> None:
    async def body(router: Router, gang: Gang) -> None:
        task = asyncio.create_task(read(router, ask("a")))
        await until(lambda: gang.incarnation.taken)
        router.on_lost("rank 0 died (given up)")
        (last,) = await task
        assert (last.finish_reason, last.error) == ("abort", "rank 0 died (given up)")
        with pytest.raises(Unavailable, match="given up") as refused:
            await read(router, ask("b"))
        assert refused.value.retry_after_s == 13

    with_router(body)


def test_prefix_index_gets_the_kv_page_count_of_the_started_gang() -> None:
    async def body(router: Router, gang: Gang) -> None:
        for i in range(9):
            task = asyncio.create_task(read(router, Request(f"r{i}", tuple(range(100 * i, 100 * i + 41)))))
            await until(lambda name=f"r{i}": name in gang.incarnation.taken)
            gang.incarnation.said.put_nowait(outputs(1, f"r{i}", ended=True))
            await task
        assert router._balancer.load(0).pages == 30

    with_router(body)


COSTS = StepCosts(
    decode_ms={"1": 10.0, "4": 12.0},
    decode_ms_per_1000_tokens=0.1,
    target_rows_ms={"1": 10.0, "101": 110.0},
    prompt_prefix_ms_per_1000_tokens=0.1,
    prompt_row_ms_per_1000_tokens=0.0,
    crowd=0.0,
)


def test_expected_wait_uses_reported_step_costs_and_queue_after_a_restart_too() -> None:
    """A row takes a millisecond. A gang that was lost has all prompts to compute again."""

    async def body(router: Router, gang: Gang) -> None:
        def expected() -> float:
            router._admission._forecast = None
            return router._admission.expected_wait(5).seconds

        gang.infos = [rank_info(page_size=4, kv_pages=30_000, step_costs=COSTS)]
        router._admission.on_gang_up(120_000, _step_times_of(gang.infos[0]))
        tasks = [asyncio.create_task(read(router, ask("long", 4000)))]
        await until(lambda: gang.incarnation.taken == ["long"])
        assert expected() == pytest.approx(4.1, abs=0.3)
        gang.incarnation.status = EngineStatus(queued_tokens=0, submitted=0, prefill_drift=1.0)
        assert expected() == pytest.approx(4.1, abs=0.3), "the rank does not know of it yet"
        gang.incarnation.status = EngineStatus(queued_tokens=1000, submitted=1, prefill_drift=2.0)
        router._admission._ranks[0].last_report_at = 0.0
        assert expected() == pytest.approx(2.2, abs=0.3), "at half the speed"
        gang.incarnation.said.put_nowait(outputs(1, "long"))
        await until(lambda: not router._admission._ranks[0].queue)
        await router.on_down(LOSS)
        life = gang.begin()
        gang.infos = [rank_info(page_size=4, kv_pages=30_000, step_costs=COSTS)]
        router.on_up()
        await until(lambda: life.taken == ["long"])
        (again,) = router._admission._ranks[0].queue.values()
        assert (again.uncomputed_tokens, again.length, again.submission_number, router._admission.waiting) == (
            4001,
            4001,
            1,
            0,
        )
        assert expected() == pytest.approx(8.2, abs=0.6), "what was learned of the machine stays"
        for task in tasks:
            task.cancel()

    with_router(body)
