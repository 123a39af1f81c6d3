"""A cluster of three Ray nodes on this machine, in a process of its own; prints what it found as JSON.

`python -m tests.actors.many_nodes` is what test_many_nodes.py runs.
"""

import asyncio
import os
import time
from dataclasses import asdict
from typing import Any

import ray

from cluster.actors.cluster_capacity import Layout
from cluster.actors.gang import Gang, GangSpec
from cluster.actors.peer_gangs import gang_name
from cluster.actors.placement import reserve
from cluster.actors.router import Router
from cluster.config import EngineConfig
from tests.actors.apart import CHECKOUT, nodes, say
from tests.actors.counting_engine import SLOW
from tests.actors.gangs import ask, left_behind, read

NODES = ("a", "b", "c")
CPUS = 4


@ray.remote(num_cpus=0, max_concurrency=4)
class Replica:
    """Stands where a Serve replica would, on the node whose resource it asks for."""

    async def nodes(self, count: int, strategy: Any, cpus: float = 1.0) -> list[str]:
        """The node ids of the ranks, in rank order."""
        placement = await reserve(
            Layout(({"CPU": cpus},) * count, strategy, wait_s=20.0), f"test/{strategy}-{count}-{cpus}"
        )
        placement.remove()
        return list(placement.node_of_rank)

    async def start(self) -> dict[str, Any]:
        config = EngineConfig(model_path="counting", tp_size=2, attn_dp_size=2)
        layout = Layout(({"CPU": 1.0, "b": 0.1}, {"CPU": 1.0}), "STRICT_SPREAD", wait_s=20.0)
        self.gang = Gang(GangSpec(config, layout, gang_name("test", "wide"), "tests.actors.counting_engine:build"))
        await self.gang.start()
        self.router = Router(self.gang)
        self.router.start()
        placement = self.gang._placement
        assert placement is not None
        interfaces = [info.interface for info in self.gang.infos]
        return {"nodes": list(placement.node_of_rank), "interfaces": interfaces}

    async def count(self, tokens: int) -> list[int]:
        return (await read(self.router, ask("wide", SLOW, 1, max_tokens=tokens)))[0]

    async def after(self) -> dict[str, Any]:
        placement = self.gang._placement
        assert placement is not None
        return {"nodes": list(placement.node_of_rank), **asdict(self.gang.history())}

    async def stop(self) -> None:
        await self.router.close()
        await self.gang.stop()


def wait_until_free(within_s: float = 20.0) -> None:
    """Until no CPU of the cluster is held: a placement group that was removed gives its own back a little later."""
    until = time.monotonic() + within_s
    while ray.available_resources().get("CPU", 0.0) < CPUS * len(NODES):
        assert time.monotonic() < until, ray.available_resources()
        time.sleep(0.05)


def main() -> None:
    found: dict[str, Any] = {}
    with nodes({"num_cpus": 0}, {name: {"num_cpus": CPUS, "resources": {name: 1}} for name in NODES}) as started:
        replica = Replica.options(resources={"b": 0.1}).remote()
        asked = {
            "pack": (2, "PACK"),
            "pack over two": (6, "PACK"),
            "strict pack": (4, "STRICT_PACK"),
            "spread": (6, "SPREAD"),
            "strict spread": (3, "STRICT_SPREAD"),
        }
        for what, (count, strategy) in asked.items():
            wait_until_free()  # or what another one holds would decide how few nodes this one can have
            found[what] = started.called(ray.get(replica.nodes.remote(count, strategy)))
        gang = ray.get(replica.start.remote())
        found["gang"] = started.called(gang["nodes"])
        found["interfaces"] = gang["interfaces"]
        other = found["gang"][1]
        counting = replica.count.remote(600)
        time.sleep(1.0)
        started.cluster.remove_node(started.added[other], allow_graceful=False)
        found["tokens"] = ray.get(counting, timeout=90)
        after = ray.get(replica.after.remote())
        found["lost node"] = other
        found["gang after"] = started.called(after["nodes"])
        found["restarts"] = after["restarts"]
        ray.get(replica.stop.remote())
        found["left"] = left_behind("wide")
        say(found)


if __name__ == "__main__":
    asyncio.set_event_loop(asyncio.new_event_loop())
    os.environ["PYTHONPATH"] = str(CHECKOUT)
    main()
