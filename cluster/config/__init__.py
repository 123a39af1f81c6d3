"""The settings of one engine, other names for them, and the tree shapes that they define."""

from cluster.config.engine_config import (
    DRAFT_FACTS,
    KV_CACHE_DTYPES,
    KV_SIZE_SETTINGS,
    MAX_CONTEXT_LENGTH,
    ConfigError,
    EngineConfig,
    Settings,
    as_config_error,
    spelling_hint,
)

__all__ = [
    "DRAFT_FACTS",
    "KV_CACHE_DTYPES",
    "KV_SIZE_SETTINGS",
    "MAX_CONTEXT_LENGTH",
    "ConfigError",
    "EngineConfig",
    "Settings",
    "as_config_error",
    "spelling_hint",
]
