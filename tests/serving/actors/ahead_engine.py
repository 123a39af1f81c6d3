"""A real engine whose host runs one step ahead, as with a GPU: the host reads each step's results one step later."""

from cluster.config import EngineConfig
from cluster.distributed.mesh import Rendezvous, Store
from cluster.engine import Rank, build_rank


def build(
    config: EngineConfig, rank: int = 0, rendezvous: Rendezvous | None = None, store: Store | None = None
) -> Rank:
    engine = build_rank(config, rank, rendezvous, store)
    engine.lockstep.max_in_flight = 1
    return engine
