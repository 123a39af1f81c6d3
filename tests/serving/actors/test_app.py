import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving.actors.counting_engine import SLOW
from tests.serving.api.apps import (
    LOG,
    app_args,
    deploy_config,
    eventually,
    health_status,
    metric_sum,
    serving,
    shard_actor_names,
    wait_until_running,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def deploy(replicas: int, **engine: float) -> None:
    """Deploy the application again with other settings, and wait until Serve has done it."""
    deploy_config(app_args(replicas, **engine))
    wait_until_running()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(app_args()) as url:
        yield url


def complete(url: str, *prompt: int, max_tokens: int = 8, **other_fields: Any) -> httpx.Response:
    body = {
        "model": "counting",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "return_token_ids": True,
        **other_fields,
    }
    return httpx.post(f"{url}/v1/completions", json=body, timeout=20)


def test_direct_ingress_serves_tokens_and_server_info(url):
    assert health_status(url) == 200
    response = complete(url, 100)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 8
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "counting"
    info = httpx.get(f"{url}/server_info").json()
    assert info["device_chosen_by"] == "device: auto; placement_group_config does not reserve a GPU for each rank"
    assert info["internal_states"]


def test_stream_sends_about_one_chunk_per_engine_step(url):
    body = {"model": "counting", "prompt": [SLOW, 1], "max_tokens": 200, "stream": True}
    arrival_times = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                assert "error" not in json.loads(line[6:])
                arrival_times.append(time.monotonic())
    assert 50 <= len(arrival_times) <= 105  # 100 steps of 2 tokens; after a delay, one chunk may hold two steps
    assert arrival_times[-1] - arrival_times[0] > 0.2


def test_client_disconnect_frees_its_slot(url):
    async def disconnect_early() -> None:
        async with httpx.AsyncClient() as client:
            body = {"model": "counting", "prompt": [SLOW, 1], "max_tokens": 4000, "stream": True}
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    return

    asyncio.run(disconnect_early())
    assert eventually(lambda: metric_sum(httpx.get(f"{url}/metrics").text, "aerie_open_requests") == 0.0)


def test_client_disconnects_do_not_end_other_streams(url):
    """When a client disconnects, Serve cancels every actor call that the client's task has made. So no such call may
    carry the request of another client.
    """

    async def stream_request(client: httpx.AsyncClient, number: int, leaves: bool) -> bool:
        """Stream one request, or disconnect at once if `leaves`. Returns whether nothing went wrong."""
        body = {"model": "counting", "prompt": [SLOW, number], "max_tokens": 60, "stream": True}
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if leaves:
                return True
            lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
        return lines[-1] == "data: [DONE]" and "error" not in "".join(lines)

    async def run_clients() -> list[bool]:
        async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=100)) as client:
            return await asyncio.gather(*(stream_request(client, i, leaves=i % 4 != 0) for i in range(80)))

    assert all(asyncio.run(run_clients()))
    assert health_status(url) == 200


def test_killed_shard_pauses_its_stream_and_health_is_503_meanwhile(url):
    info_before = httpx.get(f"{url}/server_info").json()
    pid = int(httpx.get(f"{url}/server_info").text.split('"pid":')[1].split(",")[0].strip("} "))
    tokens: list[int] = []
    statuses: list[int] = []
    body = {"model": "counting", "prompt": [SLOW, 1], "max_tokens": 200, "stream": True, "return_token_ids": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=40) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                tokens += event["choices"][0]["token_ids"]
            if len(tokens) >= 10 and not statuses:
                os.kill(pid, signal.SIGKILL)
                assert eventually(lambda: health_status(url) == 503)
                statuses.append(503)
    assert tokens == list(range(2, 202))
    assert eventually(lambda: health_status(url) == 200, 30)
    info_after = httpx.get(f"{url}/server_info").json()
    assert (info_before["epoch"], info_after["epoch"]) == (0, 1)
    (loss,) = info_after["restarts"]
    assert (loss["rank"], loss["kind"]) == (0, "died")
    assert complete(url, 7).status_code == 200


def test_metrics_page_sums_over_replicas_whichever_replica_answers(url):
    deploy(2)
    assert eventually(lambda: len(shard_actor_names()) == 2)
    page_before = httpx.get(f"{url}/metrics").text
    for i in range(12):
        assert complete(url, i, max_tokens=10).status_code == 200
    names = ("aerie_generated_tokens_total", "aerie_requests_total")
    expected = [{metric_sum(page_before, name) + more} for name, more in zip(names, (120, 12), strict=True)]

    def sums_of_pages() -> list[set[float]]:
        pages = [httpx.get(f"{url}/metrics").text for _ in range(6)]
        return [{metric_sum(page, name) for page in pages} for name in names]

    assert eventually(lambda: sums_of_pages() == expected), (sums_of_pages(), expected)  # replicas publish each second


def test_cancelled_scrapes_do_not_disturb_open_streams(url):
    """Clients cancel scrapes at different moments. Such scrapes of a Prometheus once took the heartbeats' threads."""

    async def stream(client: httpx.AsyncClient, number: int) -> list[int]:
        body = {"model": "counting", "prompt": [SLOW, 1000 * number], "max_tokens": 400, "stream": True}
        tokens: list[int] = []
        async with client.stream("POST", f"{url}/v1/completions", json={**body, "return_token_ids": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    tokens += json.loads(line[6:])["choices"][0]["token_ids"]
        return tokens

    async def cancel_scrape(path: str, after_s: float) -> None:
        server_url = httpx.URL(url)
        _, writer = await asyncio.open_connection(server_url.host, server_url.port)
        writer.write(f"GET /{path} HTTP/1.1\r\nHost: {server_url.host}\r\n\r\n".encode())
        await asyncio.sleep(after_s)
        writer.close()

    async def stream_and_cancel_scrapes() -> list[list[int]]:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            streams = [asyncio.create_task(stream(client, i)) for i in range(4)]
            for turn in range(100):
                path = "metrics" if turn % 10 else ("server_info", "health")[turn // 10 % 2]
                await cancel_scrape(path, (4 + 7 * turn % 26) / 1000)
            return await asyncio.gather(*streams)

    epoch_before = httpx.get(f"{url}/server_info").json()["epoch"]
    for i, tokens in enumerate(asyncio.run(stream_and_cancel_scrapes())):
        assert tokens == list(range(1000 * i + 1, 1000 * i + 401))
    info_after = httpx.get(f"{url}/server_info").json()
    assert info_after["epoch"] == epoch_before, info_after["restarts"]


def test_proxy_repeats_refusals_of_a_full_replica_and_all_are_counted(url):
    deploy(1, max_running_requests=1, max_queue_wait_s=1.0)
    assert eventually(lambda: len(shard_actor_names()) == 1)

    def refused_count() -> float:
        page = httpx.get(f"{url}/metrics").text
        lines = [line for line in page.splitlines() if line.startswith("aerie_http_responses_total{")]
        return sum(float(line.split()[-1]) for line in lines if 'route="/v1/completions",status="503"' in line)

    log_count_before = LOG.read_text().count("the proxy repeated refusals")
    body = {"model": "counting", "prompt": [SLOW, 1], "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
        lines = response.iter_lines()
        for _ in range(20):
            next(lines)
        responses = [complete(url, 7) for _ in range(40)]
    assert {response.status_code for response in responses} == {503}
    assert {response.json()["error"]["code"] for response in responses} == {"overloaded"}
    assert all(int(response.headers["retry-after"]) >= 1 for response in responses)
    assert not any("x-aerie-full" in response.headers for response in responses)

    def is_admitted() -> bool:  # the first admitted request brings the count of the refused ones
        responses.append(complete(url, 7))
        return responses[-1].status_code == 200

    assert eventually(is_admitted)
    assert eventually(lambda: refused_count() == len(responses) - 1), (refused_count(), len(responses) - 1)
    assert LOG.read_text().count("the proxy repeated refusals") > log_count_before
