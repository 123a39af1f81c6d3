"""The router over a fake gang: what its tasks do on unexpected errors and losses, and what it reports then."""

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
from tests.support.rank_info import rank_info

LOSS = Loss(0, "died", 7, "target", "the process died", 0, 0.0, 0.1)
ItemQueue = asyncio.Queue[Any]


class FakeIncarnation:
    """A fake incarnation of one rank. It records the ids of submitted requests in `submitted_ids`. Tests put step
    items in `items`: its stream yields them, raises those that are exceptions, and ends at None.
    """

    def __init__(self, spec: GangSpec, on_commands: Callable[[Commands], None]) -> None:
        self.spec, self.submitted_ids, self.failed = spec, [], ""  # type: ignore[var-annotated]
        self.items: ItemQueue = asyncio.Queue()
        self.made_progress = False
        self.status: EngineStatus | None = None
        self._on_commands = on_commands
        self.shards = [SimpleNamespace(put=SimpleNamespace(remote=self._put))]

    async def _put(self, commands: Commands) -> None:
        self._on_commands(commands)
        self.submitted_ids += [request.request_id for request in commands.submits]

    async def open_stream(self, rank: int) -> AsyncIterator[Any]:
        while (item := await self.items.get()) is not None:
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


class FakeGang:
    """A fake gang of one rank. `on_commands` is called with all commands that a shard gets."""

    def __init__(self) -> None:
        config = EngineConfig(model_path="m", page_size=4)
        self.spec = GangSpec(config, layout_of(1, bundle_per_worker={"CPU": 1}), "test/by-hand")
        self.infos: list[RankInfo] = []
        self.start_s, self.lost_reason = 12.3, ""
        self.on_commands: Callable[[Commands], None] = lambda commands: None
        self.incarnation: Any = None

    def begin(self) -> FakeIncarnation:
        self.infos = [rank_info(page_size=4, kv_pages=30)]
        self.incarnation = FakeIncarnation(self.spec, self.on_commands)
        return self.incarnation

    async def watch(self, owner: Any) -> None:
        await asyncio.Event().wait()


def make_request(name: str, prompt: int = 9) -> Request:
    return Request(name, tuple(range(prompt)), RequestParams(max_tokens=4))


async def read_outputs(router: Router, request: Request) -> list[SequenceOutput]:
    return [output async for output in router.generate(request)]


async def wait_until(condition: Callable[[], Any]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the condition did not become true")


def run_with_router(body: Callable[[Router, FakeGang], Any]) -> None:
    async def run_body() -> None:
        gang = FakeGang()
        router = Router(gang)  # type: ignore[arg-type]
        gang.begin()
        router.start()
        try:
            await body(router, gang)
        finally:
            await router.close()

    asyncio.run(run_body())


def outputs(step: int, *names: str, ended: bool = False) -> StepItem:
    finish = "length" if ended else None
    return StepItem(0, step, tuple(SequenceOutput(name, (step,), finish_reason=finish) for name in names))  # type: ignore[arg-type]


def test_router_marks_the_rank_failed_when_sending_commands_raises() -> None:
    async def body(router: Router, gang: FakeGang) -> None:
        def raise_type_error(commands: Commands) -> None:
            raise TypeError("cannot pickle")

        gang.incarnation._on_commands = raise_type_error
        task = asyncio.create_task(read_outputs(router, make_request("a")))
        await wait_until(lambda: gang.incarnation.failed)
        assert "its commands failed: cannot pickle" in gang.incarnation.failed
        await router.on_down(LOSS)
        restarted = gang.begin()
        router.on_up()
        await wait_until(lambda: restarted.submitted_ids == ["a"])
        restarted.items.put_nowait(outputs(1, "a", ended=True))
        assert (await task)[-1].finish_reason == "length"

    run_with_router(body)


@pytest.mark.parametrize("item", [KeyError("what"), SimpleNamespace(nothing=1)], ids=["stream raises", "invalid item"])
def test_router_marks_the_rank_failed_when_reading_outputs_raises(item: Any) -> None:
    async def body(router: Router, gang: FakeGang) -> None:
        task = asyncio.create_task(read_outputs(router, make_request("a")))
        await wait_until(lambda: gang.incarnation.submitted_ids)
        gang.incarnation.items.put_nowait(item)
        await wait_until(lambda: gang.incarnation.failed)
        assert "its outputs failed" in gang.incarnation.failed
        task.cancel()

    run_with_router(body)


def test_outputs_before_a_loss_count_and_only_the_fatal_step_is_suspect() -> None:
    async def body(router: Router, gang: FakeGang) -> None:
        first_incarnation = gang.incarnation
        names = [f"s{i}" for i in range(116)]
        tasks = [asyncio.create_task(read_outputs(router, make_request(name))) for name in names]
        await wait_until(lambda: len(first_incarnation.submitted_ids) == 116)
        first_incarnation.items.put_nowait(StepItem(0, 0, admitted=tuple(names[:16])))
        for _ in range(2):
            assert not first_incarnation.made_progress, "first tokens alone do not prove that decode steps work"
            first_incarnation.items.put_nowait(outputs(1, *names[:16]))
            await wait_until(first_incarnation.items.empty)
        first_incarnation.items.put_nowait(StepItem(0, 1, admitted=("s20",)))  # the fatal step
        first_incarnation.items.put_nowait(None)
        await router.on_down(LOSS)
        assert [stream.name for stream in router._streams.values() if stream.in_fatal_step] == [
            "s20"
        ] and first_incarnation.made_progress
        second_incarnation = gang.begin()
        router.on_up()
        late_task = asyncio.create_task(read_outputs(router, make_request("late")))
        await wait_until(lambda: len(second_incarnation.submitted_ids) == 117)
        assert second_incarnation.submitted_ids == [
            *names,
            "late",
        ]  # the 16 streams with tokens come first; all go in one call
        for task in (*tasks, late_task):
            task.cancel()

    run_with_router(body)


def test_stream_resumed_from_another_replica_bypasses_admission_limits() -> None:
    async def body(router: Router, gang: FakeGang) -> None:
        router._admission._config = gang.spec.config.model_copy(update={"max_queued_requests": 1})
        tasks = [asyncio.create_task(read_outputs(router, make_request("first")))]
        await wait_until(lambda: gang.incarnation.submitted_ids)
        with pytest.raises(Overloaded):
            await read_outputs(router, make_request("new"))
        tasks.append(asyncio.create_task(read_outputs(router, replace(make_request("resumed"), resumed_tokens=3))))
        await wait_until(lambda: gang.incarnation.submitted_ids == ["first", "resumed"])
        for task in tasks:
            task.cancel()

    run_with_router(body)


def test_started_stream_that_the_engine_refuses_ends_with_finish_reason_error() -> None:
    """An error of the request itself would be wrong: it could have been reported before the stream started."""

    async def body(router: Router, gang: FakeGang) -> None:
        task = asyncio.create_task(read_outputs(router, make_request("a")))
        await wait_until(lambda: gang.incarnation.submitted_ids)
        gang.incarnation.items.put_nowait(outputs(1, "a"))
        gang.incarnation.items.put_nowait(StepItem(0, 1, refused=(("a", "no grammar"),)))
        last = (await task)[-1]
        assert (last.finish_reason, last.error) == ("error", "the engine would not resume it: no grammar")

    run_with_router(body)


def test_lost_gang_aborts_its_streams_and_refuses_new_requests() -> None:
    async def body(router: Router, gang: FakeGang) -> None:
        task = asyncio.create_task(read_outputs(router, make_request("a")))
        await wait_until(lambda: gang.incarnation.submitted_ids)
        router.on_lost("rank 0 died (given up)")
        (last,) = await task
        assert (last.finish_reason, last.error) == ("abort", "rank 0 died (given up)")
        with pytest.raises(Unavailable, match="given up") as raised:
            await read_outputs(router, make_request("b"))
        assert raised.value.retry_after_s == 13

    run_with_router(body)


def test_prefix_index_gets_the_kv_page_count_of_the_started_gang() -> None:
    async def body(router: Router, gang: FakeGang) -> None:
        for i in range(9):
            task = asyncio.create_task(read_outputs(router, Request(f"r{i}", tuple(range(100 * i, 100 * i + 41)))))
            await wait_until(lambda name=f"r{i}": name in gang.incarnation.submitted_ids)
            gang.incarnation.items.put_nowait(outputs(1, f"r{i}", ended=True))
            await task
        assert router._balancer.load(0).pages == 30

    run_with_router(body)


COSTS = StepCosts(
    decode_ms={"1": 10.0, "4": 12.0},
    decode_ms_per_1000_tokens=0.1,
    target_rows_ms={"1": 10.0, "101": 110.0},
    prompt_prefix_ms_per_1000_tokens=0.1,
    prompt_row_ms_per_1000_tokens=0.0,
    crowd=0.0,
)


def test_expected_wait_uses_reported_step_costs_and_queue_after_a_restart_too() -> None:
    """A row takes a millisecond. After a loss the gang must compute all prompts again."""

    async def body(router: Router, gang: FakeGang) -> None:
        def expected_wait_s() -> float:
            router._admission._forecast = None
            return router._admission.expected_wait(5).seconds

        gang.infos = [rank_info(page_size=4, kv_pages=30_000, step_costs=COSTS)]
        router._admission.on_gang_up(120_000, _step_times_of(gang.infos[0]))
        tasks = [asyncio.create_task(read_outputs(router, make_request("long", 4000)))]
        await wait_until(lambda: gang.incarnation.submitted_ids == ["long"])
        assert expected_wait_s() == pytest.approx(4.1, abs=0.3)
        gang.incarnation.status = EngineStatus(queued_tokens=0, submitted=0, prefill_drift=1.0)
        assert expected_wait_s() == pytest.approx(4.1, abs=0.3), "the report is older than the submission"
        gang.incarnation.status = EngineStatus(queued_tokens=1000, submitted=1, prefill_drift=2.0)
        router._admission._ranks[0].last_report_at = 0.0
        assert expected_wait_s() == pytest.approx(2.2, abs=0.3), "1000 tokens at half the speed"
        gang.incarnation.items.put_nowait(outputs(1, "long"))
        await wait_until(lambda: not router._admission._ranks[0].queue)
        await router.on_down(LOSS)
        restarted = gang.begin()
        gang.infos = [rank_info(page_size=4, kv_pages=30_000, step_costs=COSTS)]
        router.on_up()
        await wait_until(lambda: restarted.submitted_ids == ["long"])
        (requeued,) = router._admission._ranks[0].queue.values()
        assert (requeued.uncomputed_tokens, requeued.length, requeued.submission_number, router._admission.waiting) == (
            4001,
            4001,
            1,
            0,
        )
        assert expected_wait_s() == pytest.approx(8.2, abs=0.6), "the learnt drift must survive the restart"
        for task in tasks:
            task.cancel()

    run_with_router(body)
