"""Ranks of the real engine are killed during constrained decoding: clients get the tokens of plain decoding."""

import asyncio
import os
import signal

import pytest

from cluster.actors.gang import Gang, GangSpec
from cluster.actors.peer_gangs import gang_name
from cluster.actors.placement import layout_of
from cluster.actors.router import Router
from cluster.engine import build_engine
from tests.parity.harness import run
from tests.parity.test_many_grammars import config, grammar_requests
from tests.serving.actors.gangs import with_gang
from tests.serving.actors.test_engine_faults import StreamRecorder
from tests.serving.actors.test_faults import rank_pids_of, wait_until, wait_until_unhealthy

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

REQUEST_STRIDE = 12  # this test runs every 12th request of tests/parity/test_many_grammars.py
KILLS = 2


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 3), (4, 4)])
@pytest.mark.parametrize("groups", [1, 2])
def test_killed_ranks_do_not_change_the_tokens_of_constrained_streams(groups: int, topk: int, num_steps: int) -> None:
    requests = grammar_requests(1.0)[::REQUEST_STRIDE]
    expected_run = run(build_engine(config(0, 0)), requests, max_steps=5000)
    name = f"grammars-{groups}-{topk}"
    settings = config(topk, num_steps, tp_size=2, attn_dp_size=groups, max_queue_wait_s=600)
    layout = layout_of(2, bundle_per_worker={"CPU": 0.5})

    async def body(gang: Gang, router: Router) -> None:
        readers = [StreamRecorder() for _ in requests]
        tasks = [
            asyncio.create_task(reader.read_all(router, request))
            for reader, request in zip(readers, requests, strict=True)
        ]
        interrupted_ids = set[str]()
        for kill in range(KILLS):
            ended_count = sum(task.done() for task in tasks)
            open_readers = [reader for reader, task in zip(readers, tasks, strict=True) if not task.done()]
            token_count_before = sum(len(reader.tokens) for reader in open_readers)
            await wait_until(lambda: sum(len(reader.tokens) for reader in open_readers) > token_count_before + 40, 60.0)  # noqa: B023
            interrupted_ids |= {
                request.request_id
                for request, reader, task in zip(requests, readers, tasks, strict=True)
                if reader.tokens and not task.done()
            }
            os.kill(rank_pids_of(gang)[kill % 2], signal.SIGKILL)
            await asyncio.wait_for(wait_until_unhealthy(router), 10.0)
            assert ended_count < len(tasks)
        await asyncio.wait_for(asyncio.gather(*tasks), 240.0)
        assert len(interrupted_ids) >= 4, "too few streams had tokens when a rank was killed"
        assert [reader.tokens for reader in readers] == [
            expected_run.tokens[request.request_id] for request in requests
        ]
        finish_reasons = [reader.last.finish_reason for reader in readers if reader.last is not None]
        assert finish_reasons == [expected_run.last[request.request_id].finish_reason for request in requests]

    with_gang(GangSpec(settings, layout, gang_name("test", name)), body)
