"""Gangs of counting engines for the tests: started, asked, ended, and looked for afterwards."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from ray.util import list_named_actors
from ray.util.placement_group import placement_group_table

from cluster.actors.gang import Gang, GangSpec
from cluster.actors.peer_gangs import gang_name
from cluster.actors.placement import layout_of
from cluster.actors.router import Router
from cluster.config import EngineConfig
from cluster.request import Request, RequestParams, SequenceOutput


def spec(name: str, factory: str = "tests.actors.counting_engine:build", world: int = 1, **settings: Any) -> GangSpec:
    """Of `world` ranks, each its own attention group unless attn_dp_size says otherwise."""
    config = EngineConfig(**{"model_path": "counting", "tp_size": world, "attn_dp_size": world, **settings})
    return GangSpec(config, layout_of(world, bundle_per_worker={"CPU": 0.5}), gang_name("test", name), factory)


def ask(name: str, *prompt: int, max_tokens: int = 6) -> Request:
    return Request(name, prompt, RequestParams(max_tokens=max_tokens))


async def read(router: Router, request: Request) -> tuple[list[int], SequenceOutput]:
    outputs = [output async for output in router.generate(request)]
    return [token for output in outputs for token in output.token_ids], outputs[-1]


def with_gang(gang_spec: GangSpec, body: Callable[[Gang, Router], Coroutine[Any, Any, None]]) -> None:
    """Start a gang, run the test's body, stop it; nothing of it may be left."""

    async def whole() -> None:
        gang = Gang(gang_spec)
        await gang.start()
        router = Router(gang)
        router.start()
        try:
            await body(gang, router)
        finally:
            await router.close()
            await gang.stop()

    asyncio.run(whole())
    assert left_behind(gang_spec.name.rpartition("/")[2]) == []


def left_behind(name: str) -> list[str]:
    """Live shards and placement groups of a gang, after a little patience."""
    until = time.monotonic() + 5
    while True:
        actors = [e["name"] for e in list_named_actors(all_namespaces=True) if f"/{name}#" in e["name"]]
        groups = [g["state"] for g in placement_group_table().values() if g["name"].endswith(f"/{name}")]
        left = [*actors, *(state for state in groups if state != "REMOVED")]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)
