"""The real engine in steps that take longer than any limit: work is no freeze, however slow; doing nothing is one."""

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
from tests.actors.gangs import spec, with_gang
from tests.actors.slowed_engine import BLOCK, BURN, BURN_S, LOAD, ROWS
from tests.actors.test_faults import pids, unhealthy, until
from tests.tiny import target_folder

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

LIMIT_S = 1.0
TOKENS = 400


def real(name: str, folder: Path, world: int, trouble: str = "", **more: object):
    shutil.copytree(target_folder(), folder, dirs_exist_ok=True)
    if trouble:
        (folder / trouble).touch()
    settings = {"dtype": "float64", "max_total_tokens": 4096, "num_threads": 1, "watchdog_timeout_s": LIMIT_S, **more}
    settings |= {"mixed_prefill_size": 512}  # the long prompt in one step, whoever decodes
    return spec(name, "tests.actors.slowed_engine:build", world, model_path=str(folder), **settings)


class Reader:
    """A stream of the gang, read along."""

    def __init__(self, router: Router, name: str, prompt: int, max_tokens: int, rank: int) -> None:
        ids = tuple(3 + i % 60 for i in range(prompt))
        params = RequestParams(temperature=0.0, seed=1, max_tokens=max_tokens, ignore_eos=True)
        self.request = Request(name, ids, params, routed_dp_rank=rank)
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.task = asyncio.create_task(self._read(router))

    async def _read(self, router: Router) -> None:
        async for output in router.generate(self.request):
            self.tokens += output.token_ids
            self.finish = output.finish_reason or self.finish


@asynccontextmanager
async def streams_of(router: Router, world: int) -> AsyncIterator[list[Reader]]:
    """Streams on every rank that have begun; at the end all have ended well."""
    readers = [Reader(router, f"r{i}", 5, TOKENS, i % world) for i in range(2 * world)]
    await until(lambda: all(reader.tokens for reader in readers), 60)
    yield readers
    await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), 120)
    assert [(r.finish, len(r.tokens)) for r in readers] == [("length", TOKENS)] * len(readers)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_long_computing_step_is_not_treated_as_a_freeze(world: int, tmp_path: Path) -> None:
    async def body(gang: Gang, router: Router) -> None:
        async with streams_of(router, world):
            long, began, reasons = Reader(router, "long", ROWS + 50, 4, world - 1), time.monotonic(), []
            while not long.task.done():
                status = await router.status()
                reasons += [status.reason] if not status.healthy else []
                await asyncio.sleep(0.1)
            assert time.monotonic() - began > BURN_S > 3 * LIMIT_S, "it was not slow"
            assert long.finish == "length"
        # a machine that is busy with other things may make an answer late, but says nothing about the step
        assert gang.gang_errors == [] and [reason for reason in reasons if "heartbeat" not in reason] == []

    with_gang(real(f"burns-{world}", tmp_path, world, BURN), body)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rank_blocked_in_a_layer_is_reported_frozen_and_its_streams_continue(world: int, tmp_path: Path) -> None:
    async def body(gang: Gang, router: Router) -> None:
        async with streams_of(router, world):
            long = Reader(router, "long", ROWS + 50, 4, world - 1)
            reason = await asyncio.wait_for(unhealthy(router), 30)
            assert reason.startswith(f"rank {world - 1} frozen at step ") and "did nothing for" in reason
            await asyncio.wait_for(long.task, 120)
            assert long.finish == "length"
        (loss,) = gang.gang_errors
        assert (loss.rank, loss.kind, loss.phase) == (world - 1, "frozen", "target")

    with_gang(real(f"blocks-{world}", tmp_path, world, BLOCK), body)


@pytest.mark.slow
@pytest.mark.parametrize(("load_s", "floors"), [(6.0, 1.0), (90.0, None)])
def test_restart_patience_follows_the_duration_of_the_first_start(
    load_s: float, floors: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short load where restarts have little patience, and a long one where they have what a server has."""
    if floors is not None:
        monkeypatch.setattr(gangs, "MIN_RESTART_TIMEOUT_S", floors)
        monkeypatch.setattr(gangs, "MIN_STALL_TIMEOUT_S", floors)

    async def body(gang: Gang, router: Router) -> None:
        assert gang.start_s > load_s and gang.restart_timeout_s > 2 * load_s
        readers = [Reader(router, f"r{i}", 5, TOKENS, 0) for i in range(2)]
        await until(lambda: all(reader.tokens for reader in readers), 60)
        os.kill(pids(gang)[0], signal.SIGKILL)
        await until(lambda: gang.gang_errors and gang.gang_errors[0].restored_s is not None, 2 * load_s + 120)
        await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), 120)
        assert [(reader.finish, len(reader.tokens)) for reader in readers] == [("length", TOKENS)] * 2
        (loss,) = gang.gang_errors
        assert loss.attempts == 1 and (loss.restored_s or 0.0) > load_s

    name = f"loads-{load_s:.0f}"
    (tmp_path / LOAD).write_text(str(load_s))
    with_gang(real(name, tmp_path, 1), body)
