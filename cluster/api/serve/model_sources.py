"""Resolves the hub models of an application to commits, so that all its processes load the same files."""

from collections.abc import Mapping
from typing import Any

from cluster.api.serve.settings import AppSettings, resolve_engine_paths
from cluster.arch.hub import hub_models, pin
from cluster.config import EngineConfig
from cluster.config.aliases import ALIASES, SPECULATIVE_CONFIG

SHOWN = {"model_path": "model", "speculative_draft_model_path": "draft", "tokenizer_path": "tokenizer"}
LOADING = {"model_path": "model_source", "tokenizer_path": "tokenizer_source"}  # names in model_loading_config


def pinned(settings: AppSettings) -> AppSettings:
    """Return the settings with every hub name resolved to a commit. Folders stay unchanged, since each node resolves
    them itself. Names that already hold a commit stay unchanged.

    Raises:
        ConfigError: a hub has no such model or revision, or neither the hub nor the cache can resolve the name.
    """
    config = resolve_engine_paths(settings.llm.engine_config())
    names = hub_models(config)
    if not names:
        return settings
    config = pin(config)
    loading, kwargs = settings.llm.model_loading_config, dict(settings.llm.engine_kwargs)
    for name in names:
        source = str(getattr(config, name))
        if name in LOADING and (name == "model_path" or loading.tokenizer_source is not None):
            loading = loading.model_copy(update={LOADING[name]: source})
        else:
            kwargs = _with(kwargs, name, source)
    llm = settings.llm.model_copy(update={"model_loading_config": loading, "engine_kwargs": kwargs})
    return settings.model_copy(update={"llm_configs": [llm]})


def facts_of_sources(config: EngineConfig) -> dict[str, str]:
    """Return the name, revision and commit of each hub model, as /server_info and the log show them."""
    facts: dict[str, str] = {}
    for name, model in hub_models(config).items():
        shown = SHOWN[name]
        facts |= {f"{shown}_source": model.name, f"{shown}_revision": model.revision, f"{shown}_commit": model.commit}
    return facts


def _with(kwargs: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    """Return `engine_kwargs` with the value `source` for the setting `name`, under the alias that the user gave."""
    made = {key: source if ALIASES.get(key, key) == name else value for key, value in kwargs.items()}
    nested = made.get("speculative_config")
    if isinstance(nested, Mapping):
        own = {key: source if SPECULATIVE_CONFIG.get(key) == name else value for key, value in nested.items()}
        made["speculative_config"] = own
    return made
