"""Start four Ray nodes that declare one or two GPUs, run gangs on them, and print a JSON result.

Each node has an IP address of its own. test_uneven_nodes.py runs this script. It
starts a gang of three attention groups twice: from a node with two GPUs, and from a node with one GPU. The ranks are
counting engines.
"""

import asyncio
import os
from dataclasses import replace
from typing import Any

import ray

from cluster.actors.gang import Gang, GangSpec
from cluster.actors.peer_gangs import gang_name
from cluster.actors.placement import layout_of
from cluster.actors.router import Router
from cluster.config import EngineConfig
from cluster.status import RankInfo
from tests.serving.actors.apart import CHECKOUT, print_result, start_ray_cluster
from tests.serving.actors.counting_engine import CountingEngine, Link, PeerLostError, Rendezvous, Store, open_store
from tests.serving.actors.gangs import left_behind, make_request, read_stream
from tests.support.rank_info import rank_info

__all__ = ["PeerLostError", "Rendezvous", "make_engine", "open_store"]

GPUS = {"a": 1, "b": 2, "c": 2, "d": 1}
GROUPS, WORLD = 3, 6


class GpuReportingEngine(CountingEngine):
    """A counting engine whose `RankInfo.kernels` holds the GPUs that CUDA would see, and the host of the rendezvous."""

    def __init__(self, config: EngineConfig, rank: int, rendezvous_host: str, link: Link) -> None:
        super().__init__(config, rank, link)
        self.rendezvous_host = rendezvous_host

    def info(self) -> RankInfo:
        gpus_and_host = f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'all')} at {self.rendezvous_host}"
        return rank_info(
            self.config.page_size, rank=self.rank, dp_rank=self.rank * GROUPS // WORLD, kernels=gpus_and_host
        )


def make_engine(config: EngineConfig, rank: int, rendezvous: Rendezvous, store: Store | None) -> CountingEngine:
    return GpuReportingEngine(config, rank, rendezvous.host, Link(rank, config.tp_size, rendezvous, store))


@ray.remote(num_cpus=0)
class Replica:
    """An actor in the place of a Serve replica. Its options request a resource that only one node has."""

    async def gang(self, name: str) -> dict[str, Any]:
        """Run a gang for one request. Returns three entries.

        `nodes` are the ranks' node ids in rank order, `said` the ranks' `RankInfo.kernels`, `tokens` the request's
        tokens.
        """
        config = EngineConfig(model_path="counting", tp_size=WORLD, attn_dp_size=GROUPS, device="cuda")
        layout = replace(layout_of(WORLD, device="cuda"), group_size=WORLD // GROUPS)
        gang = Gang(GangSpec(config, layout, gang_name("test", name), "tests.serving.actors.uneven_nodes:make_engine"))
        await gang.start()
        router = Router(gang)
        router.start()
        assert gang._placement is not None
        tokens = (await read_stream(router, make_request(name, 1)))[0]
        gang_facts = {
            "nodes": gang._placement.node_of_rank,
            "said": [info.kernels for info in gang.infos],
            "tokens": tokens,
        }
        await router.close()
        await gang.stop()
        return gang_facts


def main() -> None:
    result: dict[str, Any] = {}
    addresses = {name: f"127.0.0.{2 + i}" for i, name in enumerate(GPUS)}
    node_settings = {
        name: {"num_cpus": 4, "num_gpus": gpus, "resources": {name: 1}, "node_ip_address": addresses[name]}
        for name, gpus in GPUS.items()
    }
    with start_ray_cluster({"num_cpus": 0}, node_settings) as running_cluster:
        for node_name in ("b", "a"):
            gang_facts = ray.get(
                Replica.options(resources={node_name: 0.1}).remote().gang.remote(node_name), timeout=120
            )
            node_names = running_cluster.names_of(gang_facts["nodes"])
            result[node_name] = {
                **gang_facts,
                "nodes": node_names,
                "address": addresses[node_names[0]],
                "left": left_behind(node_name),
            }
        print_result(result)


if __name__ == "__main__":
    asyncio.set_event_loop(asyncio.new_event_loop())
    os.environ["PYTHONPATH"] = str(CHECKOUT)
    main()
