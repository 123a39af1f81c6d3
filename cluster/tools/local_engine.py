"""Build the engine of a command that runs a model in its own process."""

import argparse

from cluster.config import EngineConfig
from cluster.engine.build import build_engine
from cluster.engine.engine import Engine
from cluster.tools.engine_flags import engine_settings


def engine_of(args: argparse.Namespace, model: str) -> Engine:
    """Return the engine that the flags describe. `model` is the target: a folder, or a name on a hub.

    Raises:
        ConfigError: a setting cannot be honoured.
    """
    return build_engine(EngineConfig.from_kwargs(engine_settings(args, model)))
