"""The engine, without Ray: takes requests, runs one step after another, returns their outputs."""

from cluster.engine.build import build_engine, build_rank
from cluster.engine.engine import Engine, Rank
from cluster.engine.step_loop import StepLoop, StepResult
from cluster.status import EngineStatus

__all__ = ["Engine", "EngineStatus", "Rank", "StepLoop", "StepResult", "build_engine", "build_rank"]
