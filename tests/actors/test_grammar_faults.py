"""Ranks of the real engine killed in the middle of grammars: clients get the tokens of plain decoding."""

import asyncio
import os
import signal

import pytest

from cluster.actors.gang import Gang, GangSpec
from cluster.actors.peer_gangs import gang_name
from cluster.actors.placement import layout_of
from cluster.actors.router import Router
from cluster.engine import build_engine
from tests.actors.gangs import with_gang
from tests.actors.test_engine_faults import Read
from tests.actors.test_faults import pids, unhealthy, until
from tests.parity.harness import run
from tests.parity.test_many_grammars import asked, config

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

EVERY = 12  # of the wild grammars
KILLS = 2


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 3), (4, 4)])
@pytest.mark.parametrize("groups", [1, 2])
def test_killed_ranks_do_not_change_the_tokens_of_constrained_streams(groups: int, topk: int, num_steps: int) -> None:
    requests = asked(1.0)[::EVERY]
    said = run(build_engine(config(0, 0)), requests, limit=5000)
    name = f"grammars-{groups}-{topk}"
    settings = config(topk, num_steps, tp_size=2, attn_dp_size=groups, max_queue_wait_s=600)
    layout = layout_of(2, bundle_per_worker={"CPU": 0.5})

    async def body(gang: Gang, router: Router) -> None:
        read = [Read() for _ in requests]
        tasks = [asyncio.create_task(each.all(router, one)) for each, one in zip(read, requests, strict=True)]
        cut = 0
        for kill in range(KILLS):
            ended = sum(task.done() for task in tasks)
            flowing = [each for each, task in zip(read, tasks, strict=True) if not task.done()]
            before = sum(len(each.tokens) for each in flowing)
            await until(lambda: sum(len(each.tokens) for each in flowing) > before + 40, 60.0)  # noqa: B023
            cut += sum(bool(each.tokens) and not task.done() for each, task in zip(read, tasks, strict=True))
            os.kill(pids(gang)[kill % 2], signal.SIGKILL)
            await asyncio.wait_for(unhealthy(router), 10.0)
            assert ended < len(tasks)
        await asyncio.wait_for(asyncio.gather(*tasks), 240.0)
        assert cut >= 4, "some streams were in the middle"
        assert [each.tokens for each in read] == [said.tokens[one.request_id] for one in requests]
        ends = [each.last.finish_reason for each in read if each.last is not None]
        assert ends == [said.last[one.request_id].finish_reason for one in requests]

    with_gang(GangSpec(settings, layout, gang_name("test", name)), body)
