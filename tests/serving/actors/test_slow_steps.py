"""Steps of the real engine take longer than any limit: a rank that computes is healthy, a blocked rank is frozen."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.actors import gang as gangs
from cluster.actors.gang import Gang
from cluster.actors.router import Router
from cluster.request import Request, RequestParams
from tests.serving.actors.gangs import spec, with_gang
from tests.serving.actors.slowed_engine import BLOCK, BURN, BURN_S, LOAD, MIN_ROWS
from tests.serving.actors.test_faults import rank_pids_of, wait_until, wait_until_unhealthy
from tests.support.tiny_checkpoints import target_folder

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

LIMIT_S = 1.0
TOKENS = 400


def slowed_gang_spec(name: str, folder: Path, world: int, trouble: str = "", **config_fields: object):
    shutil.copytree(target_folder(), folder, dirs_exist_ok=True)
    if trouble:
        (folder / trouble).touch()
    settings = {
        "dtype": "float64",
        "max_total_tokens": 4096,
        "num_threads": 1,
        "watchdog_timeout_s": LIMIT_S,
        **config_fields,
    }
    settings |= {"mixed_prefill_size": 512}  # the long prompt runs in one step, whichever streams decode
    return spec(name, "tests.serving.actors.slowed_engine:build", world, model_path=str(folder), **settings)


class Reader:
    """Sends one request to a rank of the gang, and reads its stream in a task."""

    def __init__(self, router: Router, name: str, prompt_length: int, max_tokens: int, rank: int) -> None:
        token_ids = tuple(3 + i % 60 for i in range(prompt_length))
        params = RequestParams(temperature=0.0, seed=1, max_tokens=max_tokens, ignore_eos=True)
        self.request = Request(name, token_ids, params, routed_dp_rank=rank)
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.task = asyncio.create_task(self._read(router))

    async def _read(self, router: Router) -> None:
        async for output in router.generate(self.request):
            self.tokens += output.token_ids
            self.finish_reason = output.finish_reason or self.finish_reason


@asynccontextmanager
async def open_streams(router: Router, world: int) -> AsyncIterator[list[Reader]]:
    """Open two streams per rank and wait until each has a token. At the end, each must finish with all its tokens."""
    readers = [Reader(router, f"r{i}", 5, TOKENS, i % world) for i in range(2 * world)]
    await wait_until(lambda: all(reader.tokens for reader in readers), 60)
    yield readers
    await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), 120)
    assert [(r.finish_reason, len(r.tokens)) for r in readers] == [("length", TOKENS)] * len(readers)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_long_computing_step_is_not_treated_as_a_freeze(world: int, tmp_path: Path) -> None:
    async def body(gang: Gang, router: Router) -> None:
        async with open_streams(router, world):
            long_reader, started_at, reasons = Reader(router, "long", MIN_ROWS + 50, 4, world - 1), time.monotonic(), []
            while not long_reader.task.done():
                status = await router.status()
                reasons += [status.reason] if not status.healthy else []
                await asyncio.sleep(0.1)
            assert time.monotonic() - started_at > BURN_S > 3 * LIMIT_S, "the step was not slow"
            assert long_reader.finish_reason == "length"
        # A busy machine may delay a heartbeat. That is no fault of the step, so such reasons do not count.
        assert gang.gang_errors == [] and [reason for reason in reasons if "heartbeat" not in reason] == []

    with_gang(slowed_gang_spec(f"burns-{world}", tmp_path, world, BURN), body)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_rank_blocked_in_a_layer_is_reported_frozen_and_its_streams_continue(world: int, tmp_path: Path) -> None:
    async def body(gang: Gang, router: Router) -> None:
        async with open_streams(router, world):
            long_reader = Reader(router, "long", MIN_ROWS + 50, 4, world - 1)
            reason = await asyncio.wait_for(wait_until_unhealthy(router), 30)
            assert reason.startswith(f"rank {world - 1} frozen at step ") and "did nothing for" in reason
            await asyncio.wait_for(long_reader.task, 120)
            assert long_reader.finish_reason == "length"
        (loss,) = gang.gang_errors
        assert (loss.rank, loss.kind, loss.phase) == (world - 1, "frozen", "target")

    with_gang(slowed_gang_spec(f"blocks-{world}", tmp_path, world, BLOCK), body)


@pytest.mark.slow
@pytest.mark.parametrize(("load_s", "min_timeout_s"), [(6.0, 1.0), (90.0, None)])
def test_restart_patience_follows_the_duration_of_the_first_start(
    load_s: float, min_timeout_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short load with short minimum timeouts of restarts, and a long load with a server's minimum timeouts."""
    if min_timeout_s is not None:
        monkeypatch.setattr(gangs, "MIN_RESTART_TIMEOUT_S", min_timeout_s)
        monkeypatch.setattr(gangs, "MIN_STALL_TIMEOUT_S", min_timeout_s)

    async def body(gang: Gang, router: Router) -> None:
        assert gang.start_s > load_s and gang.restart_timeout_s > 2 * load_s
        readers = [Reader(router, f"r{i}", 5, TOKENS, 0) for i in range(2)]
        await wait_until(lambda: all(reader.tokens for reader in readers), 60)
        os.kill(rank_pids_of(gang)[0], signal.SIGKILL)
        await wait_until(lambda: gang.gang_errors and gang.gang_errors[0].restored_s is not None, 2 * load_s + 120)
        await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), 120)
        assert [(reader.finish_reason, len(reader.tokens)) for reader in readers] == [("length", TOKENS)] * 2
        (loss,) = gang.gang_errors
        assert loss.attempts == 1 and (loss.restored_s or 0.0) > load_s

    name = f"loads-{load_s:.0f}"
    (tmp_path / LOAD).write_text(str(load_s))
    with_gang(slowed_gang_spec(name, tmp_path, 1), body)
