"""`ingress: resilient`, whole: streams outlive the engine replica that feeds them."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from tests.actors.counting_engine import NOISY, SLOW, STUCK, TOO_LONG
from tests.api.apps import arguments, ask_all, eventually, health, kill, processes, serving, total

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

ENGINE = "ServeReplica:counting:aerie-counting-engine"
INGRESS = "ServeReplica:counting:aerie-counting "
STREAMS = 8


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    small = {"ingress_deployment_config": {"ray_actor_options": {"num_cpus": 0.1}}}
    args = arguments(ranks=2, app={"ingress": "resilient", **small}, max_queued_tokens=20_000)
    with serving(args) as url:
        yield url


def prompts() -> list[list[int]]:
    """Some slow, so that they are open for a while, with tokens that the seed decides."""
    return [[NOISY, SLOW, 1000 + i] for i in range(STREAMS)]


def running(url: str) -> int:
    return sum(rank["running"] for rank in httpx.get(f"{url}/server_info").json()["ranks"])


def test_resilient_ingress_serves_tokens_and_server_info(url: str) -> None:
    assert health(url) == 200
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
    assert eventually(lambda: running(url) == 0, 5)


def test_client_disconnect_frees_its_slot_in_the_engine(url: str) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient() as client:
            body = {"model": "counting", "prompt": [SLOW, 1], "max_tokens": 4000, "stream": True}
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    return

    asyncio.run(leave())
    assert eventually(lambda: running(url) == 0, 3)


def test_killed_ingress_ends_its_streams_in_the_engine(url: str) -> None:
    """Left to itself each would run for 40 s."""

    async def ask() -> None:
        body = {"model": "counting", "prompt": [[SLOW, i] for i in range(STREAMS)], "max_tokens": 4000, "stream": True}
        client = httpx.AsyncClient(timeout=60)
        async with client, client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                pass

    def stream() -> None:
        with suppress(httpx.HTTPError):
            asyncio.run(ask())

    reading = threading.Thread(target=stream)
    reading.start()
    assert eventually(lambda: running(url) == STREAMS)
    assert kill(INGRESS)
    reading.join()
    assert eventually(lambda: health(url) == 200, 20)
    assert eventually(lambda: running(url) == 0, 12)


def disturbed(url: str, *, word: str, number: int = signal.SIGKILL, tokens: int = 800) -> tuple[list, list, list[int]]:
    """The streams of an undisturbed run, and those of a run in which processes get a signal; and these processes."""
    calm = ask_all(url, prompts(), tokens, seed=11)
    hit: list[int] = []

    def disturb() -> None:
        if eventually(lambda: running(url) == STREAMS):
            hit.extend(kill(word, number))

    thread = threading.Thread(target=disturb)
    thread.start()
    disturbed = ask_all(url, prompts(), tokens, seed=11)
    thread.join()
    assert hit, "the streams were never all open at once"
    return calm, disturbed, hit


@pytest.mark.parametrize("word", [ENGINE, "ShardActor"], ids=["the engine replica", "the shards"])
def test_streams_keep_their_tokens_when_engine_replica_or_shards_are_killed(url: str, word: str) -> None:
    before = total(httpx.get(f"{url}/metrics").text, "aerie_resumed_streams_total")
    calm, answers, hit = disturbed(url, word=word)
    assert [a.error for a in answers] == [""] * STREAMS
    assert [a.tokens for a in answers] == [a.tokens for a in calm]
    assert len({tuple(a.tokens) for a in answers}) == STREAMS
    assert max(a.longest_pause_s for a in answers) > 0.5, "nobody noticed"
    assert not set(hit) & set(processes(word))
    page = httpx.get(f"{url}/metrics").text
    if word == ENGINE:  # counted at the ingress; the engine's own counters went with it
        assert total(page, "aerie_resumed_streams_total") == before + STREAMS
    else:
        assert total(page, "aerie_resumed_streams_total") >= before + STREAMS
        assert total(page, "aerie_gang_restarts_total") == total(page, "aerie_gang_restart_seconds_count") >= 1
        assert total(page, "aerie_rank_losses_total") >= 1
    assert eventually(lambda: health(url) == 200, 20)


@pytest.mark.slow
def test_streams_of_a_frozen_engine_replica_move_to_another_replica(url: str) -> None:
    calm, answers, hit = disturbed(url, word=ENGINE, number=signal.SIGSTOP)
    assert [a.error for a in answers] == [""] * STREAMS
    assert [a.tokens for a in answers] == [a.tokens for a in calm]
    assert eventually(lambda: not set(hit) & set(processes(ENGINE)), 30), "the frozen replica is still there"


def test_health_is_503_and_new_requests_wait_while_no_engine_runs(url: str) -> None:
    kill(ENGINE)
    assert eventually(lambda: health(url) == 503, 3)
    began = time.monotonic()
    (answer,) = ask_all(url, [[200]], 4)
    assert answer.tokens == [201, 202, 203, 204], answer
    assert time.monotonic() - began > 0.3
