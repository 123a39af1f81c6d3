"""Which callers are gone: those that Ray says no longer exist, and nobody else."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from cluster.api.serve.feed import CallerMonitor

CALLER_CHECK_S = 0.01


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(CALLER_CHECK_S)
    raise AssertionError("waited in vain")


def with_callers(alive: Callable[[str], bool], body: Callable[[CallerMonitor], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await body(CallerMonitor(alive, CALLER_CHECK_S))

    asyncio.run(whole())


def test_caller_monitor_reports_all_streams_of_a_dead_caller_and_no_others() -> None:
    asked: list[str] = []

    def alive(name: str) -> bool:
        asked.append(name)
        return name != "killed"

    async def body(callers: CallerMonitor) -> None:
        with (
            callers.open_stream("killed") as first,
            callers.open_stream("killed") as second,
            callers.open_stream("busy") as other,
        ):
            assert not first()
            await until(lambda: first() and second())
            assert not other()
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})  # a question may be under way
        asked.clear()
        await asyncio.sleep(5 * CALLER_CHECK_S)
        assert not asked, "without open streams nobody asks"
        with callers.open_stream("killed") as again:
            assert not again(), "a stream begun later is asked about anew"
            await until(again)

    with_callers(alive, body)


def test_caller_monitor_ignores_failed_checks_and_unnamed_callers() -> None:
    asked: list[str] = []

    def alive(name: str) -> bool:
        asked.append(name)
        raise RuntimeError("the GCS does not answer")

    async def body(callers: CallerMonitor) -> None:
        with callers.open_stream("a") as gone, callers.open_stream("") as nameless:
            await until(lambda: len(asked) > 3)
            assert not gone() and not nameless() and set(asked) == {"a"}

    with_callers(alive, body)
