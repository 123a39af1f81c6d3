import asyncio
import re
import time
from pathlib import Path

import pytest
import ray

from cluster.actors.cluster_capacity import Layout
from cluster.actors.gang import Gang, GangSpec, GangStartError
from cluster.actors.messages import Overloaded
from cluster.actors.peer_gangs import deployment_samples, publish, replica_id_of
from cluster.actors.placement import PlacementError
from cluster.actors.router import Router
from cluster.config import ConfigError, EngineConfig
from cluster.observability.metrics import ServingMetrics, merge
from tests.serving.actors.counting_engine import SLOW, STUCK, TOO_LONG
from tests.serving.actors.gangs import left_behind, make_request, read_stream, spec, with_gang

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def test_concurrent_requests_stream_and_leave_no_running_requests():
    async def body(gang: Gang, router: Router) -> None:
        results = await asyncio.gather(
            *(read_stream(router, make_request(f"r{i}", 1000 * i, max_tokens=i + 1)) for i in range(20))
        )
        for i, (tokens, last) in enumerate(results):
            assert tokens == list(range(1000 * i + 1, 1000 * i + i + 2))
            assert last.finish_reason == "length"
        status = await router.status()
        assert status.healthy and status.running == 0 and status.queued_tokens == 0
        assert status.ranks[0].context_length == 4096
        assert status.heartbeats[0].status.running == 0 and status.heartbeats[0].phase
        assert (status.history.epoch, status.history.restarts) == (0, ())
        page = merge(await router.metrics()).decode()
        labels = 'model_name="counting",rank="0",replica="side-by-side"'
        assert f"aerie_generated_tokens_total{{{labels}}} {sum(range(1, 21))}.0" in page

    with_gang(spec("side-by-side"), body)


def test_both_ranks_generate_half_of_the_tokens_of_concurrent_requests():
    async def body(gang: Gang, router: Router) -> None:
        await asyncio.gather(*(read_stream(router, make_request(f"r{i}", SLOW, i, max_tokens=20)) for i in range(8)))
        steps: list[int] = []
        while len(steps) < 2 or min(steps) < 10:  # a heartbeat may have begun before the last steps
            await gang.request_heartbeats(2.0)
            steps = [beat.steps for beat in gang.heartbeats if beat is not None]
        assert max(steps) < 40, "four requests in turn take 40 steps, at once 10"
        pages = [merge([sample]).decode() for sample in await router.metrics()]
        generated = [re.findall(r"aerie_generated_tokens_total\{.*\} (.*)", page) for page in pages]
        assert generated == [["80.0"], ["80.0"]], "a rank without requests takes steps too, but generates no tokens"

    with_gang(spec("two-ranks", world=2), body)


def test_closed_or_cancelled_stream_aborts_its_request():
    async def body(gang: Gang, router: Router) -> None:
        stream = router.generate(make_request("long", SLOW, 1, max_tokens=100_000))
        async for _ in stream:
            break
        await stream.aclose()
        task = asyncio.create_task(read_stream(router, make_request("cancelled", SLOW, 1, max_tokens=100_000)))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while (status := await router.status()).heartbeats[0].status.aborted < 2:
            await asyncio.sleep(0.05)
        assert status.heartbeats[0].status.aborted == 2 and status.heartbeats[0].status.running == 0
        assert status.running == 0 and status.queued_tokens == 0

    with_gang(spec("leaving"), body)


def test_invalid_request_raises_and_a_full_queue_refuses_at_once():
    async def body(gang: Gang, router: Router) -> None:
        with pytest.raises(ValueError, match="too long"):
            await read_stream(router, make_request("bad", TOO_LONG))
        stuck_tasks = [
            asyncio.create_task(read_stream(router, make_request(f"s{i}", STUCK, *[1] * 398, max_tokens=2)))
            for i in range(2)
        ]
        await asyncio.sleep(0.3)
        started_at = time.monotonic()
        with pytest.raises(Overloaded, match="max_queued_tokens"):
            await read_stream(router, make_request("one-too-many", *[1] * 400, max_tokens=2))
        assert time.monotonic() - started_at < 1.0, "a step takes 1.5 s"
        assert (await router.status()).queued_tokens == pytest.approx(800, abs=10)
        assert [last.finish_reason for _, last in await asyncio.gather(*stuck_tasks)] == ["length"] * 2
        assert (await read_stream(router, make_request("fits-again", *[1] * 400, max_tokens=2)))[0] == [2, 3]

    with_gang(spec("refused", max_queued_tokens=1000), body)


def test_stalled_rank_is_unhealthy_until_the_stall_ends():
    async def body(gang: Gang, router: Router) -> None:
        task = asyncio.create_task(read_stream(router, make_request("stuck", STUCK, 1, max_tokens=6)))
        while (status := await router.status()).healthy:
            assert not task.done(), "three steps of 1.5 s have passed"
            await asyncio.sleep(0.05)
        assert re.match(r"rank 0 frozen at step \d, phase target: did nothing for", status.reason)
        assert (await task)[0] == [2, 3, 4, 5, 6, 7]
        assert (await router.status()).healthy

    with_gang(spec("stalled", watchdog_timeout_s=0.7), body)


@pytest.mark.parametrize(
    ("name", "settings", "error", "expected_message"),
    [
        ("refused", {"model_path": "missing"}, ConfigError, "model_path 'missing'"),
        ("refused-of-two", {"model_path": "missing", "world": 2}, ConfigError, "model_path 'missing'"),
        ("one-of-two", {"model_path": "bad-on-1", "world": 2}, ConfigError, "rank 1: the checkpoint differs"),
        ("dies", {"model_path": "dies-on-1", "world": 2}, GangStartError, "rank 1 died while loading"),
        (
            "no-factory",
            {"factory": "tests.serving.actors.counting_engine:nothing"},
            GangStartError,
            "rank 0 could not load",
        ),
        ("too-few", {"world": 2, "tp_size": 4}, ConfigError, "tp_size 4 needs as many bundles, .* has 2"),
    ],
)
def test_failed_gang_start_names_the_cause_and_leaves_no_actors(name, settings, error, expected_message):
    with pytest.raises(error, match=expected_message):
        with_gang(spec(name, **settings), None)  # type: ignore[arg-type]
    assert left_behind(name) == []


def test_placement_error_names_the_missing_gpu():
    layout = Layout(({"CPU": 1.0, "GPU": 2.0},), join_wait_s=0.5)
    with pytest.raises(PlacementError, match=r"no node of the cluster has a GPU: set device to cpu"):
        with_gang(GangSpec(EngineConfig(model_path="x"), layout, "test/no-room"), None)  # type: ignore[arg-type]
    assert left_behind("no-room") == []


def test_deployment_samples_exclude_gangs_of_other_deployments():
    async def start_gangs_and_check_samples() -> None:
        first, second = Gang(spec("first")), Gang(spec("second"))
        other_deployment = Gang(GangSpec(first.spec.config, first.spec.layout, "other/third", first.spec.factory))
        gangs = (first, second, other_deployment)
        await asyncio.gather(*(gang.start() for gang in gangs))
        try:
            for gang in gangs:
                serving_metrics = ServingMetrics(model_name="m", replica=replica_id_of(gang.spec.name))
                serving_metrics.on_refused("invalid")
                await publish(gang, serving_metrics.serialize())
            samples = await deployment_samples(first)
            assert len(samples) == 3  # the rank of each of the two gangs, and the registry sample of the other replica
            page = merge(samples).decode()
            assert 'aerie_steps_total{model_name="m",rank="0",replica="first"}' in page
            assert 'aerie_steps_total{model_name="m",rank="0",replica="second"}' in page
            assert 'aerie_requests_total{model_name="m",outcome="invalid",replica="second"} 1.0' in page
            assert len(await deployment_samples(other_deployment)) == 1
        finally:
            await asyncio.gather(*(gang.stop() for gang in gangs))

    asyncio.run(start_gangs_and_check_samples())


def test_shards_end_with_their_killed_owner():
    @ray.remote(num_cpus=0)
    class Owner:
        async def start(self) -> int:
            self.gang = Gang(spec("orphan"))
            await self.gang.start()
            return self.gang.infos[0].pid

    owner = Owner.options(lifetime="detached", name="owner", namespace="test").remote()
    pid = ray.get(owner.start.remote())
    ray.kill(owner)
    assert left_behind("orphan") == []
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()
