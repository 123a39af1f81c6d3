"""Where the models of an application come from: names of a hub become commits, which all its processes then load."""

from collections.abc import Mapping
from typing import Any

from cluster.api.serve.settings import AppSettings, resolve_engine_paths
from cluster.arch.hub import hub_models, pin
from cluster.config import EngineConfig
from cluster.config.aliases import ALIASES, SPECULATIVE_CONFIG

SHOWN = {"model_path": "model", "speculative_draft_model_path": "draft", "tokenizer_path": "tokenizer"}
LOADING = {"model_path": "model_source", "tokenizer_path": "tokenizer_source"}  # settings that model_loading_config has


def pinned(settings: AppSettings) -> AppSettings:
    """The settings with every name of a hub resolved to a commit. A folder stays as it is written, since it is looked
    for on each node. Settings that are pinned already stay as they are.

    Raises:
        ConfigError: a hub has no such model or revision, or neither it nor the cache can tell.
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
    """What /server_info and the log tell of the models that come from a hub: name, revision and commit of each."""
    facts: dict[str, str] = {}
    for name, model in hub_models(config).items():
        shown = SHOWN[name]
        facts |= {f"{shown}_source": model.name, f"{shown}_revision": model.revision, f"{shown}_commit": model.commit}
    return facts


def _with(kwargs: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    """`engine_kwargs` with another value for the setting `name`, in the spelling in which it is given."""
    made = {key: source if ALIASES.get(key, key) == name else value for key, value in kwargs.items()}
    nested = made.get("speculative_config")
    if isinstance(nested, Mapping):
        own = {key: source if SPECULATIVE_CONFIG.get(key) == name else value for key, value in nested.items()}
        made["speculative_config"] = own
    return made
