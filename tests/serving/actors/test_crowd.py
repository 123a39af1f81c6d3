"""Many concurrent clients of the served demo pair: each gets its sequential tokens, and disconnects free KV pages."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving.actors.test_serve_command import aerie_serve, free_port, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = ("def main(", "import os\n", "class Reader:\n    ", "# The following", '"""A module for', "for name in ")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    settings = (f"http_port={port}", "dtype=float64", "max_total_tokens=12000", "max_queue_wait_s=600")
    with aerie_serve(*settings, log=tmp_path_factory.mktemp("crowd") / "server.log") as process:
        wait_for(process, "READY ")
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        assert process.wait(60) == 0


def request_body(number: int) -> dict[str, Any]:
    """The body of request `number`. Prompt, length and temperature are random; the seed is the number."""
    rng = random.Random(number)
    return {
        "model": "aerie-demo",
        "prompt": rng.choice(PROMPTS) * rng.randint(1, 12),
        "max_tokens": rng.choice((4, 16, 48, 96)),
        "temperature": rng.choice((0.0, 0.8, 1.2)),
        "top_p": rng.choice((1.0, 0.9)),
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def kv_page_counts(url: str) -> dict[str, int]:
    """The numbers of free, used and cached KV pages, summed over all ranks."""
    ranks = httpx.get(f"{url}/server_info", timeout=30).json()["ranks"]
    return {name: sum(rank[f"pages_{name}"] for rank in ranks) for name in ("free", "used", "cached")}


async def completion_tokens(url: str, numbers: list[int], concurrency: int) -> list[Any]:
    """The output tokens of these requests, with at most `concurrency` requests open at a time."""
    semaphore = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def complete(number: int) -> Any:
            async with semaphore:
                response = await client.post(f"{url}/v1/completions", json=request_body(number))
                assert response.status_code == 200, response.text
                return response.json()["choices"][0]["token_ids"]

        return await asyncio.gather(*(complete(number) for number in numbers))


def test_64_concurrent_requests_get_the_same_tokens_as_sequential_requests(url: str) -> None:
    numbers = list(range(64))
    concurrent_tokens = asyncio.run(completion_tokens(url, numbers, concurrency=64))
    sequential_tokens = asyncio.run(completion_tokens(url, numbers, concurrency=1))
    assert [len(tokens) for tokens in sequential_tokens] == [request_body(number)["max_tokens"] for number in numbers]
    assert concurrent_tokens == sequential_tokens


async def stream_and_disconnect(url: str, number: int) -> int:
    """Stream a request and disconnect after a random number of chunks. Returns the number of chunks that were read."""
    rng = random.Random(-number)
    chunk_count, chunk_limit = 0, rng.randint(0, 12)
    async with (
        httpx.AsyncClient(timeout=600) as client,
        client.stream(
            "POST", f"{url}/v1/completions", json={**request_body(number), "max_tokens": 400, "stream": True}
        ) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                assert "error" not in json.loads(line[6:]), line
                chunk_count += 1
            if chunk_count > chunk_limit:
                break
    return chunk_count


def test_disconnects_of_200_clients_free_all_kv_pages(url: str) -> None:
    tokens_before = asyncio.run(completion_tokens(url, [3], concurrency=1))
    pages_before = kv_page_counts(url)

    async def run_clients() -> list[int]:
        return await asyncio.gather(*(stream_and_disconnect(url, number) for number in range(200)))

    chunk_counts = asyncio.run(run_clients())
    assert len(chunk_counts) == 200 and max(chunk_counts) > 1

    async def wait_until_no_page_is_used() -> dict[str, int]:
        for _ in range(300):
            page_counts = kv_page_counts(url)
            if page_counts["used"] == 0:
                return page_counts
            await asyncio.sleep(0.1)
        return kv_page_counts(url)

    pages_after = asyncio.run(wait_until_no_page_is_used())
    assert pages_after["used"] == 0, pages_after
    assert (
        pages_after["free"] + pages_after["cached"]
        == pages_before["free"] + pages_before["cached"] + pages_before["used"]
    )
    assert asyncio.run(completion_tokens(url, [3], concurrency=1)) == tokens_before
