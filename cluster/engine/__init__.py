"""The engine, without Ray: takes requests, runs one step after another, returns their outputs."""

from cluster.engine.build import build_engine, build_rank
from cluster.engine.engine import Engine
from cluster.engine.rank import Follower, Rank, StepResult
from cluster.status import EngineStatus

__all__ = ["Engine", "EngineStatus", "Follower", "Rank", "StepResult", "build_engine", "build_rank"]
