"""Four Ray nodes of one and two GPUs, each with an address of its own, in a process of their own; prints what it found.

`python -m tests.actors.uneven_nodes` is what test_uneven_nodes.py runs: a gang of three attention groups, started once
from a node with two GPUs and once from one with one. Ranks count instead of computing.
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
from tests.actors.apart import CHECKOUT, nodes, say
from tests.actors.counting_engine import CountingEngine, Link, PeerLostError, Rendezvous, Store, open_store
from tests.actors.gangs import ask, left_behind, read
from tests.info import rank_info

__all__ = ["PeerLostError", "Rendezvous", "make_engine", "open_store"]

GPUS = {"a": 1, "b": 2, "c": 2, "d": 1}
GROUPS, WORLD = 3, 6


class Placed(CountingEngine):
    """Says, as its kernels, which GPUs CUDA would see in its process, and where it met the other ranks."""

    def __init__(self, config: EngineConfig, rank: int, met: str, link: Link) -> None:
        super().__init__(config, rank, link)
        self.met = met

    def info(self) -> RankInfo:
        seen = f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'all')} at {self.met}"
        return rank_info(self.config.page_size, rank=self.rank, dp_rank=self.rank * GROUPS // WORLD, kernels=seen)


def make_engine(config: EngineConfig, rank: int, rendezvous: Rendezvous, store: Store | None) -> CountingEngine:
    return Placed(config, rank, rendezvous.host, Link(rank, config.tp_size, rendezvous, store))


@ray.remote(num_cpus=0)
class Replica:
    """Stands where a Serve replica would, on the node whose resource it asks for."""

    async def gang(self, name: str) -> dict[str, Any]:
        """The nodes of a gang's ranks in rank order, what each says of itself, and what the gang answers."""
        config = EngineConfig(model_path="counting", tp_size=WORLD, attn_dp_size=GROUPS, device="cuda")
        layout = replace(layout_of(WORLD, device="cuda"), group_size=WORLD // GROUPS)
        gang = Gang(GangSpec(config, layout, gang_name("test", name), "tests.actors.uneven_nodes:make_engine"))
        await gang.start()
        router = Router(gang)
        router.start()
        assert gang._placement is not None
        tokens = (await read(router, ask(name, 1)))[0]
        found = {"nodes": gang._placement.node_of_rank, "said": [info.kernels for info in gang.infos], "tokens": tokens}
        await router.close()
        await gang.stop()
        return found


def main() -> None:
    found: dict[str, Any] = {}
    addresses = {name: f"127.0.0.{2 + i}" for i, name in enumerate(GPUS)}
    made = {
        name: {"num_cpus": 4, "num_gpus": gpus, "resources": {name: 1}, "node_ip_address": addresses[name]}
        for name, gpus in GPUS.items()
    }
    with nodes({"num_cpus": 0}, made) as started:
        for at in ("b", "a"):
            one = ray.get(Replica.options(resources={at: 0.1}).remote().gang.remote(at), timeout=120)
            order = started.called(one["nodes"])
            found[at] = {**one, "nodes": order, "address": addresses[order[0]], "left": left_behind(at)}
        say(found)


if __name__ == "__main__":
    asyncio.set_event_loop(asyncio.new_event_loop())
    os.environ["PYTHONPATH"] = str(CHECKOUT)
    main()
