"""The engine of commands that run a model in their own process."""

import argparse

from cluster.config import EngineConfig
from cluster.engine.build import build_engine
from cluster.engine.engine import Engine
from cluster.tools.engine_flags import engine_settings


def engine_of(args: argparse.Namespace, model: str) -> Engine:
    """The engine that the flags ask for, with the target in folder `model` or of that name on a hub.

    Raises:
        ConfigError: a setting cannot be honoured.
    """
    return build_engine(EngineConfig.from_kwargs(engine_settings(args, model)))
