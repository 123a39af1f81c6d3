"""The engine without Ray: requests in, one step after another, request outputs out."""

from cluster.engine.build import build_engine
from cluster.engine.engine import Engine, EngineStatus, StepResult

__all__ = ["Engine", "EngineStatus", "StepResult", "build_engine"]
