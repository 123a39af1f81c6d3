"""The program of one rank of the gangs of `cluster/bench/steady_runs.py`: it has a rank of each contender, and runs one
of them at a time, as the messages on stdin say.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cluster.bench.rank_process import answer_messages
from cluster.bench.steady_runs import BatchLoad, run_rank
from cluster.bench.streams import HOST
from cluster.config import EngineConfig
from cluster.distributed.mesh import Rendezvous
from cluster.engine import Engine, build_rank


class SteadyRank:
    """Rank `rank` of every contender."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._engines: dict[str, Engine] = {}

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Build this rank of a contender if the message has `build`, the contender's name. Otherwise run this rank's
        part of a run of the contender that `run` names, and return its `RankSteps`.
        """
        if "build" in message:
            config = EngineConfig.from_kwargs(message["settings"])
            engine = build_rank(config, self._rank, Rendezvous(HOST, message["port"], message["epoch"]))
            assert isinstance(engine, Engine), "every rank has an attention group of its own"
            self._engines[message["build"]] = engine
            return {}
        return asdict(run_rank(self._engines[message["run"]], BatchLoad.of(message["loads"][self._rank])))


if __name__ == "__main__":
    answer_messages(SteadyRank(int(sys.argv[1])).answer)
