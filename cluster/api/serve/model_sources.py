"""Resolves the hub models of an application to commits, so that all its processes load the same files."""

from collections.abc import Mapping
from typing import Any

from cluster.api.serve.settings import AppSettings, resolve_engine_paths
from cluster.arch.hub import hub_models, pin
from cluster.config import EngineConfig
from cluster.config.aliases import ALIASES, SPECULATIVE_CONFIG

DISPLAY_NAMES = {"model_path": "model", "speculative_draft_model_path": "draft", "tokenizer_path": "tokenizer"}
# the names of these settings in model_loading_config, which has no name for the draft
LOADING_CONFIG_FIELDS = {"model_path": "model_source", "tokenizer_path": "tokenizer_source"}


def pin_hub_models(settings: AppSettings) -> AppSettings:
    """Return the settings with every hub name resolved to a commit. Paths of folders stay unchanged, since each node
    resolves them itself. Names that already hold a commit stay unchanged.

    Raises:
        ConfigError: a hub has no such model or revision, or neither the hub nor the cache can resolve the name.
    """
    config = resolve_engine_paths(settings.llm.engine_config())
    names = hub_models(config)
    if not names:
        return settings
    config = pin(config)
    loading_config, engine_kwargs = settings.llm.model_loading_config, dict(settings.llm.engine_kwargs)
    for name in names:
        source = str(getattr(config, name))
        if name in LOADING_CONFIG_FIELDS and (name == "model_path" or loading_config.tokenizer_source is not None):
            loading_config = loading_config.model_copy(update={LOADING_CONFIG_FIELDS[name]: source})
        else:
            engine_kwargs = _with_source(engine_kwargs, name, source)
    llm = settings.llm.model_copy(update={"model_loading_config": loading_config, "engine_kwargs": engine_kwargs})
    return settings.model_copy(update={"llm_configs": [llm]})


def hub_source_facts(config: EngineConfig) -> dict[str, str]:
    """Return the name, revision and commit of each hub model, as /server_info and the log show them. The result is
    empty if all models are folders.
    """
    facts: dict[str, str] = {}
    for name, model in hub_models(config).items():
        label = DISPLAY_NAMES[name]
        facts |= {f"{label}_source": model.name, f"{label}_revision": model.revision, f"{label}_commit": model.commit}
    return facts


def _with_source(engine_kwargs: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    """Return `engine_kwargs` with the value `source` for the setting `name`, under the alias that the user gave."""
    updated = {key: source if ALIASES.get(key, key) == name else value for key, value in engine_kwargs.items()}
    nested = updated.get("speculative_config")
    if isinstance(nested, Mapping):
        updated_nested = {
            key: source if SPECULATIVE_CONFIG.get(key) == name else value for key, value in nested.items()
        }
        updated["speculative_config"] = updated_nested
    return updated
