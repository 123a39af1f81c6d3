"""The whole application with `ingress: resilient`: streams survive the loss of their engine replica."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from tests.serving.actors.counting_engine import SEED_DEPENDENT, SLOW, STUCK, TOO_LONG
from tests.serving.api.apps import (
    app_args,
    ask_all,
    descendant_pids,
    eventually,
    health_status,
    kill,
    metric_sum,
    serving,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

ENGINE_REPLICA = "ServeReplica:counting:aerie-counting-engine"
INGRESS_REPLICA = "ServeReplica:counting:aerie-counting"
STREAMS = 8


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    small = {"ingress_deployment_config": {"ray_actor_options": {"num_cpus": 0.1}}}
    args = app_args(ranks=2, app={"ingress": "resilient", **small}, max_queued_tokens=20_000)
    with serving(args) as url:
        yield url


def prompts() -> list[list[int]]:
    """Prompts of streams whose tokens the seed decides. The first one makes all steps slow, so that streams stay open
    for a while.
    """
    return [[SLOW, 1000], *([SEED_DEPENDENT, 1000 + i] for i in range(1, STREAMS))]


def running_requests(url: str) -> int:
    """How many requests run on all ranks."""
    return sum(rank["running"] for rank in httpx.get(f"{url}/server_info").json()["ranks"])


def test_resilient_ingress_serves_tokens_and_server_info(url: str) -> None:
    assert health_status(url) == 200
    (answer,) = ask_all(url, [[100]], 8)
    assert answer.tokens == list(range(101, 109)), answer
    info = httpx.get(f"{url}/server_info").json()
    assert info["healthy"] and len(info["ranks"]) == 2
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 4096


def test_resilient_ingress_passes_on_the_status_of_engine_refusals(url: str) -> None:
    body = {"model": "counting", "prompt": [TOO_LONG, 5], "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 400 and "too long" in answer.json()["error"]["message"], answer.text

    async def crowd() -> list[httpx.Response]:
        body = {"model": "counting", "prompt": [STUCK, *range(1, 4000)], "max_tokens": 2}
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*(client.post(f"{url}/v1/completions", json=body) for _ in range(12)))

    answers = asyncio.run(crowd())
    assert {answer.status_code for answer in answers} == {200, 503}
    refused = next(answer for answer in answers if answer.status_code == 503)
    assert int(refused.headers["retry-after"]) >= 1 and "max_queue" in refused.json()["error"]["message"]


def test_single_call_may_exceed_the_queue_token_limit(url: str) -> None:
    body = {"model": "counting", "prompt": [[SLOW, *range(1, 4000)]] * 12, "max_tokens": 90}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["length"] * 12
    assert eventually(lambda: running_requests(url) == 0)


def test_client_disconnect_frees_its_slot_in_the_engine(url: str) -> None:
    async def disconnect() -> None:
        async with httpx.AsyncClient() as client:
            body = {"model": "counting", "prompt": [SLOW, 1], "max_tokens": 4000, "stream": True}
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    return

    asyncio.run(disconnect())
    assert eventually(lambda: running_requests(url) == 0)


def test_killed_ingress_ends_its_streams_in_the_engine(url: str) -> None:
    """Without an abort each stream would run for 40 s."""

    async def ask() -> None:
        body = {"model": "counting", "prompt": [[SLOW, i] for i in range(STREAMS)], "max_tokens": 4000, "stream": True}
        client = httpx.AsyncClient(timeout=60)
        async with client, client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                pass

    def stream() -> None:
        with suppress(httpx.HTTPError):
            asyncio.run(ask())

    reader = threading.Thread(target=stream)
    reader.start()
    assert eventually(lambda: running_requests(url) == STREAMS)
    assert kill(INGRESS_REPLICA)
    reader.join()
    assert eventually(lambda: health_status(url) == 200, 60)
    assert eventually(lambda: running_requests(url) == 0, 12)


def run_with_signal(
    url: str, *, process_name: str, signal_number: int = signal.SIGKILL, tokens: int = 300
) -> tuple[list, list, list[int]]:
    """Run all streams twice, and send a signal to processes during the second run.

    Returns the answers of the first run, the answers of the second run, and the ids of these processes.
    """
    undisturbed_answers = ask_all(url, prompts(), tokens, seed=11)
    signalled_pids: list[int] = []

    def send_signal() -> None:
        if eventually(lambda: running_requests(url) == STREAMS):
            signalled_pids.extend(kill(process_name, signal_number))

    thread = threading.Thread(target=send_signal)
    thread.start()
    disturbed_answers = ask_all(url, prompts(), tokens, seed=11)
    thread.join()
    assert signalled_pids, "the streams were never all open at once"
    return undisturbed_answers, disturbed_answers, signalled_pids


@pytest.mark.parametrize(
    "process_name",
    [ENGINE_REPLICA, pytest.param("ShardActor", marks=pytest.mark.slow)],
    ids=["engine replica", "shard actors"],
)
def test_streams_keep_their_tokens_when_engine_replica_or_shards_are_killed(url: str, process_name: str) -> None:
    resumed_before = metric_sum(httpx.get(f"{url}/metrics").text, "aerie_resumed_streams_total")
    undisturbed_answers, answers, signalled_pids = run_with_signal(url, process_name=process_name)
    assert [answer.error for answer in answers] == [""] * STREAMS
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in undisturbed_answers]
    assert len({tuple(answer.tokens) for answer in answers}) == STREAMS
    assert max(answer.longest_pause_s for answer in answers) > 0.5, "no stream paused"
    assert not set(signalled_pids) & set(descendant_pids(process_name))
    page = httpx.get(f"{url}/metrics").text
    if process_name == ENGINE_REPLICA:  # the ingress counts resumes; the dead replica's counters are lost
        assert metric_sum(page, "aerie_resumed_streams_total") == resumed_before + STREAMS
    else:
        assert metric_sum(page, "aerie_resumed_streams_total") >= resumed_before + STREAMS
        assert (
            metric_sum(page, "aerie_gang_restarts_total") == metric_sum(page, "aerie_gang_restart_seconds_count") >= 1
        )
        assert metric_sum(page, "aerie_rank_losses_total") >= 1
    assert eventually(lambda: health_status(url) == 200, 60)


@pytest.mark.slow
def test_streams_of_a_frozen_engine_replica_move_to_another_replica(url: str) -> None:
    undisturbed_answers, answers, signalled_pids = run_with_signal(
        url, process_name=ENGINE_REPLICA, signal_number=signal.SIGSTOP
    )
    assert [answer.error for answer in answers] == [""] * STREAMS
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in undisturbed_answers]
    assert eventually(lambda: not set(signalled_pids) & set(descendant_pids(ENGINE_REPLICA)), 30), (
        "the frozen replica is still there"
    )


def test_health_is_503_and_new_requests_wait_while_no_engine_runs(url: str) -> None:
    start = time.monotonic()
    kill(ENGINE_REPLICA)
    with ThreadPoolExecutor(1) as client:
        answers = client.submit(ask_all, url, [[200]], 4)
        assert eventually(lambda: health_status(url) == 503)
        (answer,) = answers.result()
    assert answer.tokens == [201, 202, 203, 204], answer
    assert time.monotonic() - start > 0.3
