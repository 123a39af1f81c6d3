"""Start a cluster of three Ray nodes on this machine, place gangs on it, and print a JSON result.

test_many_nodes.py runs `python -m tests.serving.actors.many_nodes`.
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
from tests.serving.actors.apart import CHECKOUT, print_result, start_ray_cluster
from tests.serving.actors.counting_engine import SLOW
from tests.serving.actors.gangs import left_behind, make_request, read_stream

NODES = ("a", "b", "c")
CPUS = 4


@ray.remote(num_cpus=0, max_concurrency=4)
class Replica:
    """An actor in the place of a Serve replica. Its options request a resource that only one node has."""

    async def place_ranks(self, count: int, strategy: Any, cpus: float = 1.0) -> list[str]:
        """Reserve a placement of `count` ranks and free it. Returns the node ids of the ranks, in rank order."""
        placement = await reserve(
            Layout(({"CPU": cpus},) * count, strategy, wait_s=20.0), f"test/{strategy}-{count}-{cpus}"
        )
        placement.remove()
        return list(placement.node_of_rank)

    async def start(self) -> dict[str, Any]:
        """Start a gang of two ranks on two nodes. Returns the node and the network interface of each rank."""
        config = EngineConfig(model_path="counting", tp_size=2, attn_dp_size=2)
        layout = Layout(({"CPU": 1.0, "b": 0.1}, {"CPU": 1.0}), "STRICT_SPREAD", wait_s=20.0)
        self.gang = Gang(
            GangSpec(config, layout, gang_name("test", "wide"), "tests.serving.actors.counting_engine:build")
        )
        await self.gang.start()
        self.router = Router(self.gang)
        self.router.start()
        placement = self.gang._placement
        assert placement is not None
        interfaces = [info.interface for info in self.gang.infos]
        return {"nodes": list(placement.node_of_rank), "interfaces": interfaces}

    async def count(self, tokens: int) -> list[int]:
        """Read a slow stream of this many tokens from the gang."""
        return (await read_stream(self.router, make_request("wide", SLOW, 1, max_tokens=tokens)))[0]

    async def facts_now(self) -> dict[str, Any]:
        """The nodes of the gang's ranks now, and the gang's history of restarts."""
        placement = self.gang._placement
        assert placement is not None
        return {"nodes": list(placement.node_of_rank), **asdict(self.gang.history())}

    async def stop(self) -> None:
        await self.router.close()
        await self.gang.stop()


def wait_until_free(within_s: float = 20.0) -> None:
    """Wait until all CPUs of the cluster are free. Ray frees the CPUs of a removed placement group a little later."""
    deadline = time.monotonic() + within_s
    while ray.available_resources().get("CPU", 0.0) < CPUS * len(NODES):
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.05)


def main() -> None:
    result: dict[str, Any] = {}
    with start_ray_cluster(
        {"num_cpus": 0}, {name: {"num_cpus": CPUS, "resources": {name: 1}} for name in NODES}
    ) as running_cluster:
        replica = Replica.options(resources={"b": 0.1}).remote()
        placements = {
            "pack": (2, "PACK"),
            "pack over two": (6, "PACK"),
            "strict pack": (4, "STRICT_PACK"),
            "spread": (6, "SPREAD"),
            "strict spread": (3, "STRICT_SPREAD"),
        }
        for case, (count, strategy) in placements.items():
            wait_until_free()  # CPUs that an earlier placement still holds would change the nodes of this placement
            result[case] = running_cluster.names_of(ray.get(replica.place_ranks.remote(count, strategy)))
        gang_facts = ray.get(replica.start.remote())
        result["gang"] = running_cluster.names_of(gang_facts["nodes"])
        result["interfaces"] = gang_facts["interfaces"]
        removed_node = result["gang"][1]
        pending_tokens = replica.count.remote(600)
        time.sleep(1.0)
        running_cluster.cluster.remove_node(running_cluster.node_of_name[removed_node], allow_graceful=False)
        result["tokens"] = ray.get(pending_tokens, timeout=90)
        facts_after_loss = ray.get(replica.facts_now.remote())
        result["lost node"] = removed_node
        result["gang after"] = running_cluster.names_of(facts_after_loss["nodes"])
        result["restarts"] = facts_after_loss["restarts"]
        ray.get(replica.stop.remote())
        result["left"] = left_behind("wide")
        print_result(result)


if __name__ == "__main__":
    asyncio.set_event_loop(asyncio.new_event_loop())
    os.environ["PYTHONPATH"] = str(CHECKOUT)
    main()
