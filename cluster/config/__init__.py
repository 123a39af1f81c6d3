"""The settings of one engine, vLLM's names for them, and the tree shape that they define."""

from cluster.config.engine_config import (
    CACHES,
    DRAFT_FACTS,
    KV_SIZES,
    LONGEST_CONTEXT,
    ConfigError,
    EngineConfig,
    Settings,
    as_config_error,
    nearest,
)

__all__ = [
    "CACHES",
    "DRAFT_FACTS",
    "KV_SIZES",
    "LONGEST_CONTEXT",
    "ConfigError",
    "EngineConfig",
    "Settings",
    "as_config_error",
    "nearest",
]
