"""Redeploys and scale-downs under load: no request fails, and open streams finish or move."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.serving.actors.counting_engine import SLOW
from tests.serving.api.apps import (
    Answer,
    app_args,
    ask,
    ask_all,
    deploy_config,
    eventually,
    metric_sum,
    serving,
    shard_actor_names,
    wait_until_running,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

SHORT, LONG = 20, 400  # tokens of an answer; a long answer takes four seconds


class Load:
    """A load that starts twenty short requests and two long streams each second. It does not wait for
    earlier answers.
    """

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[int, Answer]] = []
        self._url = url
        self._stopped = threading.Event()

    def run(self) -> None:
        asyncio.run(self._run())

    def stop(self) -> None:
        self._stopped.set()

    async def _run(self) -> None:
        tasks: list[asyncio.Task[None]] = []
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=500)) as client:
            while not self._stopped.is_set():
                request_number = len(tasks)
                tasks.append(asyncio.create_task(self._ask(client, [request_number], SHORT, False)))
                if request_number % 11 == 0:
                    tasks.append(asyncio.create_task(self._ask(client, [SLOW, request_number], LONG, True)))
                await asyncio.sleep(0.05)
            await asyncio.gather(*tasks)

    async def _ask(self, client: httpx.AsyncClient, prompt: list[int], count: int, stream: bool) -> None:
        answer = await ask(client, self._url, prompt, count, stream=stream)
        is_expected = answer.is_complete(count) and answer.tokens == [prompt[-1] + 1 + i for i in range(count)]
        answer.error = answer.error or ("" if is_expected else f"status {answer.status}, {len(answer.tokens)} tokens")
        self.answers.append((count, answer))


@contextmanager
def under_load(url: str) -> Iterator[Load]:
    """Run the load around the `with` block: from 3 s before it to 3 s after it."""
    load = Load(url)
    thread = threading.Thread(target=load.run)
    thread.start()
    try:
        time.sleep(3)
        yield load
        time.sleep(3)
    finally:
        load.stop()
        thread.join()


def check_answers(load: Load) -> None:
    """Assert that no request failed and that more than five answers were long."""
    failed = [(count, answer.error) for count, answer in load.answers if answer.error]
    assert failed == [], f"{len(failed)} of {len(load.answers)}: {failed[:5]}"
    assert sum(count == LONG for count, _ in load.answers) > 5
    slowest = max(answer.seconds for count, answer in load.answers if count == SHORT)
    print(f"{len(load.answers)} requests, the slowest short one {slowest:.2f} s")


def with_options(args: dict[str, Any], **options: Any) -> dict[str, Any]:
    args["llm_configs"][0]["deployment_config"].update(options)
    return args


RESILIENT = {
    "ingress": "resilient",
    "ingress_deployment_config": {"ray_actor_options": {"num_cpus": 0.1}, "health_check_period_s": 0.5},
}


@pytest.mark.parametrize(
    ("app", "options"),
    [({}, {}), ({}, {"max_surge_percent": 0}), (RESILIENT, {}), (RESILIENT, {"graceful_shutdown_timeout_s": 0.5})],
    ids=["direct", "direct, in place", "resilient", "resilient, streams move"],
)
def test_a_redeploy_under_load_fails_no_request(app: dict[str, Any], options: dict[str, Any]) -> None:
    with serving(with_options(app_args(app=app), **options)) as url:
        with under_load(url) as load:
            deploy_config(with_options(app_args(app=app, max_queued_tokens=60_000), **options))
            wait_until_running()
        assert httpx.get(f"{url}/server_info").json()["healthy"]
        check_answers(load)


@pytest.mark.parametrize(
    ("app", "name"), [({}, "aerie-counting"), (RESILIENT, "aerie-counting-engine")], ids=["direct", "resilient"]
)
def test_a_scale_down_under_load_fails_no_request(app: dict[str, Any], name: str) -> None:
    args = app_args(app=app)
    with serving(args, {"name": name, "num_replicas": 2}) as url:
        gangs_before = set(shard_actor_names())
        with under_load(url) as load:
            deploy_config(args, {"name": name, "num_replicas": 1})
            wait_until_running()
        check_answers(load)
        assert eventually(lambda: len(shard_actor_names()) == 1)
        assert set(shard_actor_names()) < gangs_before, "the gang that stays was restarted"


def test_streams_longer_than_the_shutdown_timeout_end_with_an_error_event() -> None:
    args = with_options(app_args(), graceful_shutdown_timeout_s=2)
    with serving(args) as url, ThreadPoolExecutor(1) as executor:
        future = executor.submit(ask_all, url, [[SLOW, number] for number in range(6)], 3000)  # takes 30 s
        assert eventually(lambda: metric_sum(httpx.get(f"{url}/metrics").text, "aerie_ttft_seconds_count") == 6)
        deploy_config(with_options(app_args(max_queued_tokens=60_000), graceful_shutdown_timeout_s=2))
        answers = future.result(timeout=60)
        assert [answer.status for answer in answers] == [200] * 6
        assert all("it may be shutting down" in answer.error and answer.tokens for answer in answers), answers
        wait_until_running()
        assert httpx.get(f"{url}/server_info").json()["healthy"]
