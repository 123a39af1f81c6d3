"""Short work stays on the event loop; long work goes to a few threads, and errors come back."""

import asyncio
import threading

import pytest

from cluster.api.core.limits import INLINE_CHARACTERS, THREADS, off_loop


def test_where_work_is_done() -> None:
    async def names() -> tuple[str, str]:
        def where() -> str:
            return threading.current_thread().name

        return await off_loop(INLINE_CHARACTERS, where), await off_loop(INLINE_CHARACTERS + 1, where)

    here, there = asyncio.run(names())
    assert here == threading.current_thread().name
    assert there.startswith("offload")


def test_the_loop_goes_on_and_few_work_at_once() -> None:
    held = threading.Event()
    working: list[int] = []

    def work() -> None:
        working.append(1)
        assert held.wait(10)

    async def run() -> int:
        tasks = [asyncio.ensure_future(off_loop(10**6, work)) for _ in range(3 * THREADS)]
        while len(working) < THREADS:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        at_once = len(working)
        held.set()
        await asyncio.gather(*tasks)
        return at_once

    assert asyncio.run(run()) == THREADS
    assert len(working) == 3 * THREADS


def test_errors_come_back() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(off_loop(10**6, fail))
