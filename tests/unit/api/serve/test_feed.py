"""`CallerMonitor` reports a caller as gone only if Ray says that the caller no longer exists."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from cluster.api.serve.feed import CallerMonitor

CALLER_CHECK_S = 0.01


async def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(CALLER_CHECK_S)
    raise AssertionError("the condition did not become true")


def run_with_monitor(alive: Callable[[str], bool], body: Callable[[CallerMonitor], Coroutine[Any, Any, None]]) -> None:
    async def run_body() -> None:
        await body(CallerMonitor(alive, CALLER_CHECK_S))

    asyncio.run(run_body())


def test_caller_monitor_reports_all_streams_of_a_dead_caller_and_no_others() -> None:
    checked_names: list[str] = []

    def alive(name: str) -> bool:
        checked_names.append(name)
        return name != "killed"

    async def body(callers: CallerMonitor) -> None:
        with (
            callers.open_stream("killed") as first_is_gone,
            callers.open_stream("killed") as second_is_gone,
            callers.open_stream("busy") as busy_is_gone,
        ):
            assert not first_is_gone()
            await wait_until(lambda: first_is_gone() and second_is_gone())
            assert not busy_is_gone()
        await wait_until(lambda: asyncio.all_tasks() == {asyncio.current_task()})  # a check may still run
        checked_names.clear()
        await asyncio.sleep(5 * CALLER_CHECK_S)
        assert not checked_names, "without open streams no caller is checked"
        with callers.open_stream("killed") as again_is_gone:
            assert not again_is_gone(), "the caller of a later stream is checked again"
            await wait_until(again_is_gone)

    run_with_monitor(alive, body)


def test_caller_monitor_ignores_failed_checks_and_unnamed_callers() -> None:
    checked_names: list[str] = []

    def alive(name: str) -> bool:
        checked_names.append(name)
        raise RuntimeError("the GCS does not answer")

    async def body(callers: CallerMonitor) -> None:
        with callers.open_stream("a") as named_is_gone, callers.open_stream("") as unnamed_is_gone:
            await wait_until(lambda: len(checked_names) > 3)
            assert not named_is_gone() and not unnamed_is_gone() and set(checked_names) == {"a"}

    run_with_monitor(alive, body)
