"""A coalesced call: concurrent callers share one result, and a cancelled caller does not cancel the shared call."""

import asyncio
import contextvars

import pytest

from cluster.actors.coalesced_call import CoalescedCall

CALLER = contextvars.ContextVar("WHO", default="nobody")


def test_coalesced_call_shares_one_result_and_survives_a_cancelled_caller() -> None:
    caller_of_each_run: list[str] = []

    async def run_callers() -> None:
        gate = asyncio.Event()

        async def make_result() -> int:
            caller_of_each_run.append(CALLER.get())
            await gate.wait()
            return len(caller_of_each_run)

        shared = CoalescedCall(make_result, max_age_s=60.0)

        async def request(name: str) -> int:
            CALLER.set(name)
            return await shared.get()

        cancelled_caller, *other_callers = [asyncio.create_task(request(f"r{i}")) for i in range(3)]
        await asyncio.sleep(0)
        cancelled_caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled_caller
        gate.set()
        assert await asyncio.gather(*other_callers) == [1, 1]
        assert await shared.get() == 1  # still fresh

    asyncio.run(run_callers())
    assert caller_of_each_run == ["nobody"]  # runs in the context in which CoalescedCall was made, not in a caller's


def test_coalesced_call_runs_again_after_expiry_or_failure() -> None:
    runs: list[int] = []

    async def make_result() -> int:
        runs.append(1)
        if len(runs) == 2:
            raise ValueError("not now")
        return len(runs)

    async def call_three_times() -> None:
        shared = CoalescedCall(make_result, max_age_s=0.0)
        assert await shared.get() == 1
        with pytest.raises(ValueError, match="not now"):
            await shared.get()
        assert await shared.get() == 3

    asyncio.run(call_three_times())
