"""Helpers for tests of gangs: make specs and requests, run a gang, and list the actors that a stopped gang left."""

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


def spec(
    name: str, factory: str = "tests.serving.actors.counting_engine:build", world: int = 1, **settings: Any
) -> GangSpec:
    """The spec of a gang of `world` ranks. Each rank is an attention group of its own unless `attn_dp_size` is set."""
    config = EngineConfig(**{"model_path": "counting", "tp_size": world, "attn_dp_size": world, **settings})
    return GangSpec(config, layout_of(world, bundle_per_worker={"CPU": 0.5}), gang_name("test", name), factory)


def make_request(name: str, *prompt: int, max_tokens: int = 6) -> Request:
    return Request(name, prompt, RequestParams(max_tokens=max_tokens))


async def read_stream(router: Router, request: Request) -> tuple[list[int], SequenceOutput]:
    """Read the whole stream of a request. Returns all its tokens and its last output."""
    outputs = [output async for output in router.generate(request)]
    return [token for output in outputs for token in output.token_ids], outputs[-1]


def with_gang(gang_spec: GangSpec, body: Callable[[Gang, Router], Coroutine[Any, Any, None]]) -> None:
    """Start a gang, run the test's body, and stop the gang. The gang must leave no actor and no placement group."""

    async def run_gang() -> None:
        gang = Gang(gang_spec)
        await gang.start()
        router = Router(gang)
        router.start()
        try:
            await body(gang, router)
        finally:
            await router.close()
            await gang.stop()

    asyncio.run(run_gang())
    assert left_behind(gang_spec.name.rpartition("/")[2]) == []


def left_behind(name: str) -> list[str]:
    """The live shards and placement groups of a gang. Waits up to 5 s until there are none."""
    deadline = time.monotonic() + 5
    while True:
        actors = [entry["name"] for entry in list_named_actors(all_namespaces=True) if f"/{name}#" in entry["name"]]
        groups = [group["state"] for group in placement_group_table().values() if group["name"].endswith(f"/{name}")]
        leftovers = [*actors, *(state for state in groups if state != "REMOVED")]
        if not leftovers or time.monotonic() > deadline:
            return leftovers
        time.sleep(0.1)
