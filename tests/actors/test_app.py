import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.actors.counting_engine import SLOW
from tests.api.apps import LOG, arguments, deploy_config, eventually, health, serving, settled, shards, total

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def deploy(replicas: int, **engine: float) -> None:
    deploy_config(arguments(replicas, **engine))
    settled()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(arguments()) as url:
        yield url


def complete(url: str, *prompt: int, max_tokens: int = 8, **more: Any) -> httpx.Response:
    body = {"model": "counting", "prompt": list(prompt), "max_tokens": max_tokens, "return_token_ids": True, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=20)


def test_direct_ingress_serves_tokens_and_server_info(url):
    assert health(url) == 200
    answer = complete(url, 100)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "counting"
    info = httpx.get(f"{url}/server_info").json()
    assert info["device_chosen_by"] == "device: auto; placement_group_config does not reserve a GPU for each rank"
    assert info["internal_states"]


def test_stream_sends_about_one_chunk_per_engine_step(url):
    body = {"model": "counting", "prompt": [SLOW, 1], "max_tokens": 40, "stream": True}
    arrived = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                assert "error" not in json.loads(line[6:])
                arrived.append(time.monotonic())
    assert 15 <= len(arrived) <= 25  # 20 steps of 2 tokens; a slow moment may put two steps in one chunk
    assert arrived[-1] - arrived[0] > 0.2


def test_client_disconnect_frees_its_slot(url):
    async def leave() -> None:
        async with httpx.AsyncClient() as client:
            body = {"model": "counting", "prompt": [SLOW, 1], "max_tokens": 4000, "stream": True}
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    return

    asyncio.run(leave())
    assert eventually(lambda: total(httpx.get(f"{url}/metrics").text, "aerie_open_requests") == 0.0, 3.0)


def test_client_disconnects_do_not_end_other_streams(url):
    """Serve cancels every actor call that a leaving client's task has made; none may carry another's request."""

    async def ask(client: httpx.AsyncClient, number: int, leaves: bool) -> bool:
        body = {"model": "counting", "prompt": [SLOW, number], "max_tokens": 60, "stream": True}
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if leaves:
                return True
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
        return lines[-1] == "data: [DONE]" and "error" not in "".join(lines)

    async def crowd() -> list[bool]:
        async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=100)) as client:
            return await asyncio.gather(*(ask(client, i, leaves=i % 4 != 0) for i in range(80)))

    assert all(asyncio.run(crowd()))
    assert health(url) == 200


def test_killed_shard_pauses_its_stream_and_health_is_503_meanwhile(url):
    before = httpx.get(f"{url}/server_info").json()
    pid = int(httpx.get(f"{url}/server_info").text.split('"pid":')[1].split(",")[0].strip("} "))
    tokens: list[int] = []
    statuses: list[int] = []
    body = {"model": "counting", "prompt": [SLOW, 1], "max_tokens": 200, "stream": True, "return_token_ids": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=40) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                tokens += event["choices"][0]["token_ids"]
            if len(tokens) >= 10 and not statuses:
                os.kill(pid, signal.SIGKILL)
                assert eventually(lambda: health(url) == 503, 1.5)
                statuses.append(503)
    assert tokens == list(range(2, 202))
    assert eventually(lambda: health(url) == 200, 30)
    after = httpx.get(f"{url}/server_info").json()
    assert (before["epoch"], after["epoch"]) == (0, 1)
    (loss,) = after["restarts"]
    assert (loss["rank"], loss["kind"]) == (0, "died")
    assert complete(url, 7).status_code == 200


def test_metrics_page_sums_over_replicas_whichever_replica_answers(url):
    deploy(2)
    assert eventually(lambda: len(shards()) == 2)
    before = httpx.get(f"{url}/metrics").text
    for i in range(12):
        assert complete(url, i, max_tokens=10).status_code == 200
    time.sleep(1.2)
    pages = [httpx.get(f"{url}/metrics").text for _ in range(6)]
    for name, more in (("aerie_generated_tokens_total", 120), ("aerie_requests_total", 12)):
        sums = {total(page, name) for page in pages}
        assert sums == {total(before, name) + more}, (name, sums)


def test_cancelled_scrapes_do_not_disturb_open_streams(url):
    """A Prometheus that cancels its scrapes took the threads of the heartbeats with it."""

    async def stream(client: httpx.AsyncClient, number: int) -> list[int]:
        body = {"model": "counting", "prompt": [SLOW, 1000 * number], "max_tokens": 400, "stream": True}
        tokens: list[int] = []
        async with client.stream("POST", f"{url}/v1/completions", json={**body, "return_token_ids": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    tokens += json.loads(line[6:])["choices"][0]["token_ids"]
        return tokens

    async def give_up(path: str, after_s: float) -> None:
        at = httpx.URL(url)
        _, writer = await asyncio.open_connection(at.host, at.port)
        writer.write(f"GET /{path} HTTP/1.1\r\nHost: {at.host}\r\n\r\n".encode())
        await asyncio.sleep(after_s)
        writer.close()

    async def whole() -> list[list[int]]:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            streams = [asyncio.create_task(stream(client, i)) for i in range(4)]
            for turn in range(100):
                path = "metrics" if turn % 10 else ("server_info", "health")[turn // 10 % 2]
                await give_up(path, (4 + 7 * turn % 26) / 1000)
            return await asyncio.gather(*streams)

    before = httpx.get(f"{url}/server_info").json()["epoch"]
    for i, tokens in enumerate(asyncio.run(whole())):
        assert tokens == list(range(1000 * i + 1, 1000 * i + 401))
    after = httpx.get(f"{url}/server_info").json()
    assert after["epoch"] == before, after["restarts"]


def test_proxy_repeats_refusals_of_a_full_replica_and_all_are_counted(url):
    deploy(1, max_running_requests=1, max_queue_wait_s=1.0)
    assert eventually(lambda: len(shards()) == 1)

    def refused() -> float:
        page = httpx.get(f"{url}/metrics").text
        lines = [line for line in page.splitlines() if line.startswith("aerie_http_responses_total{")]
        return sum(float(line.split()[-1]) for line in lines if 'route="/v1/completions",status="503"' in line)

    said_before = LOG.read_text().count("the proxy repeated refusals")
    body = {"model": "counting", "prompt": [SLOW, 1], "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as answer:
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
        answers = [complete(url, 7) for _ in range(40)]
    assert {answer.status_code for answer in answers} == {503}
    assert {answer.json()["error"]["code"] for answer in answers} == {"overloaded"}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    assert not any("x-aerie-full" in answer.headers for answer in answers)

    def answered() -> bool:  # the first that is let in brings the count of those that were not
        answers.append(complete(url, 7))
        return answers[-1].status_code == 200

    assert eventually(answered)
    assert eventually(lambda: refused() == len(answers) - 1), (refused(), len(answers) - 1)
    assert LOG.read_text().count("the proxy repeated refusals") > said_before
