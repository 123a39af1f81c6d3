"""One answer for many who ask, which nobody who leaves takes away from the others."""

import asyncio
import contextvars

import pytest

from cluster.actors.coalesced_call import CoalescedCall

WHO = contextvars.ContextVar("WHO", default="nobody")


def test_coalesced_call_shares_one_result_and_survives_a_cancelled_caller() -> None:
    made: list[str] = []

    async def whole() -> None:
        gate = asyncio.Event()

        async def make() -> int:
            made.append(WHO.get())
            await gate.wait()
            return len(made)

        shared = CoalescedCall(make, max_age_s=60.0)

        async def request(name: str) -> int:
            WHO.set(name)
            return await shared.get()

        leaver, *others = [asyncio.create_task(request(f"r{i}")) for i in range(3)]
        await asyncio.sleep(0)
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver
        gate.set()
        assert await asyncio.gather(*others) == [1, 1]
        assert await shared.get() == 1  # still fresh

    asyncio.run(whole())
    assert made == ["nobody"]  # in the context of who made it shared, whoever asks


def test_coalesced_call_runs_again_after_expiry_or_failure() -> None:
    made: list[int] = []

    async def make() -> int:
        made.append(1)
        if len(made) == 2:
            raise ValueError("not now")
        return len(made)

    async def whole() -> None:
        shared = CoalescedCall(make, max_age_s=0.0)
        assert await shared.get() == 1
        with pytest.raises(ValueError, match="not now"):
            await shared.get()
        assert await shared.get() == 3

    asyncio.run(whole())
