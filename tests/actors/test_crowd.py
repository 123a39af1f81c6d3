"""The served demo pair under a crowd: everyone gets the tokens they would get alone, and leavers leave nothing."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.actors.test_serve_command import aerie_serve, free_port, wait_for

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


def body(number: int) -> dict[str, Any]:
    """Request `number`: mixed prompts, lengths and temperatures, each with its own seed."""
    dice = random.Random(number)
    return {
        "model": "aerie-demo",
        "prompt": dice.choice(PROMPTS) * dice.randint(1, 12),
        "max_tokens": dice.choice((4, 16, 48, 96)),
        "temperature": dice.choice((0.0, 0.8, 1.2)),
        "top_p": dice.choice((1.0, 0.9)),
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def pages(url: str) -> dict[str, int]:
    """Pages of all ranks together."""
    ranks = httpx.get(f"{url}/server_info", timeout=30).json()["ranks"]
    return {name: sum(rank[f"pages_{name}"] for rank in ranks) for name in ("free", "used", "cached")}


async def answers(url: str, numbers: list[int], at_once: int) -> list[Any]:
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def one(number: int) -> Any:
            async with gate:
                answer = await client.post(f"{url}/v1/completions", json=body(number))
                assert answer.status_code == 200, answer.text
                return answer.json()["choices"][0]["token_ids"]

        return await asyncio.gather(*(one(number) for number in numbers))


def test_64_concurrent_requests_get_the_same_tokens_as_sequential_requests(url: str) -> None:
    numbers = list(range(64))
    together = asyncio.run(answers(url, numbers, at_once=64))
    alone = asyncio.run(answers(url, numbers, at_once=1))
    assert [len(tokens) for tokens in alone] == [body(number)["max_tokens"] for number in numbers]
    assert together == alone


async def leave_early(url: str, number: int) -> int:
    """Stream a request and hang up after a random number of chunks; returns how many were read."""
    dice = random.Random(-number)
    seen, patience = 0, dice.randint(0, 12)
    async with (
        httpx.AsyncClient(timeout=600) as client,
        client.stream(
            "POST", f"{url}/v1/completions", json={**body(number), "max_tokens": 400, "stream": True}
        ) as lines,
    ):
        async for line in lines.aiter_lines():
            if line.startswith("data: {"):
                assert "error" not in json.loads(line[6:]), line
                seen += 1
            if seen > patience:
                break
    return seen


def test_disconnects_of_200_clients_free_all_kv_pages(url: str) -> None:
    before = pages(url)

    async def crowd() -> list[int]:
        return await asyncio.gather(*(leave_early(url, number) for number in range(200)))

    seen = asyncio.run(crowd())
    assert len(seen) == 200 and max(seen) > 1

    async def settled() -> dict[str, int]:
        for _ in range(300):
            now = pages(url)
            if now["used"] == 0:
                return now
            await asyncio.sleep(0.1)
        return pages(url)

    after = asyncio.run(settled())
    assert after["used"] == 0, after
    assert after["free"] + after["cached"] == before["free"] + before["cached"] + before["used"]
    assert asyncio.run(answers(url, [3], at_once=1))
