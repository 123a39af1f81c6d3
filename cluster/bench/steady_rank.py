"""The program of one rank of the gangs of `cluster/bench/steady_runs.py`: it has a rank of each contender, and runs a
few steps of one of them at a time, as the messages on stdin say.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cluster.bench.rank_process import answer_messages
from cluster.bench.steady_runs import BatchLoad, RankBatchRun
from cluster.bench.streams import HOST
from cluster.config import EngineConfig
from cluster.distributed.mesh import Rendezvous
from cluster.engine import Engine, build_rank


class SteadyRank:
    """Rank `rank` of every contender."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._engines: dict[str, Engine] = {}
        self._runs: dict[str, RankBatchRun] = {}

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Do what the message says for the contender that it names: `build` this rank of it, `begin` a run, `advance`
        the run by some steps, or `finish` it. The answer to `advance` says whether the run is over, and that to
        `finish` is the run's `RankSteps`.
        """
        match message:
            case {"build": name, "settings": settings, "port": port, "epoch": epoch}:
                config = EngineConfig.from_kwargs(settings)
                engine = build_rank(config, self._rank, Rendezvous(HOST, port, epoch))
                assert isinstance(engine, Engine), "every rank has an attention group of its own"
                self._engines[name] = engine
            case {"begin": name, "loads": loads}:
                self._runs[name] = RankBatchRun(self._engines[name], BatchLoad.of(loads[self._rank]))
            case {"advance": name, "steps": steps}:
                return {"is_over": self._runs[name].advance(steps)}
            case {"finish": name}:
                return asdict(self._runs.pop(name).record)
            case _:
                raise ValueError(f"the message has fields {sorted(message)}, which say nothing known")
        return {}


if __name__ == "__main__":
    answer_messages(SteadyRank(int(sys.argv[1])).answer)
