"""The settings of one engine, the names that vLLM has for them, and the tree that they ask for."""

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
