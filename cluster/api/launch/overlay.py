"""Applies overrides of single settings to a Serve config: those of the flags and of `--set` of `aerie serve`."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from cluster.api.serve.settings import DEPLOYMENT_OPTIONS, AppSettings, LLMConfig, read_yaml, resolve_path
from cluster.arch.hub import hub_model, name_of
from cluster.config import ConfigError, EngineConfig, spelling_hint
from cluster.config.aliases import ALIASES, EXPERT_PARALLEL_ALIAS, SPECULATIVE_CONFIG, convert_speculative_value

Override = str | tuple[str, Any]  # "key=value" with a value in YAML, or a key and its value

MODEL_KEYS = {"model": "model_source", "model_path": "model_source", "tokenizer": "tokenizer_source"} | {
    name: name for name in ("model_id", "model_source", "tokenizer_source")
}
HTTP_KEYS = {"http_host": "host", "http_port": "port"}
FILE_KEYS = ("proxy_location", "http_options", "logging_config")
APP_KEYS = tuple(name for name in AppSettings.model_fields if name != "llm_configs")
SPECULATION_SWITCHES = ("speculative_algorithm", "speculative_draft_model_path")  # null in either turns speculation off


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Return a copy of a Serve config with the overrides applied. The override of the model is applied first: it
    removes the draft, tokenizer and name of another model from the config. The other overrides may set them again.

    Raises:
        ConfigError: a key is unknown (the message has the nearest known key), or a part of the file has a wrong form.
    """
    config: dict[str, Any] = deepcopy(dict(data))
    pairs = [_parse_override(override) if isinstance(override, str) else override for override in overrides]
    for key, value in sorted(pairs, key=lambda pair: MODEL_KEYS.get(pair[0]) != "model_source"):
        _set(config, key, value)
    return config


def llm_entry(data: dict[str, Any]) -> dict[str, Any]:
    """Return the only entry of llm_configs. A missing entry is created; the path of a file is replaced by its content.

    Raises:
        ConfigError: the entry is neither a mapping nor a path.
    """
    args = _app_args(data)
    entries = args.get("llm_configs")
    entries = [{}] if entries in (None, []) else [entries] if isinstance(entries, str) else entries
    if not isinstance(entries, list):
        raise ConfigError("applications.args.llm_configs must be a list with one entry, or the path of a file")
    if isinstance(entries[0], str):
        entries[0] = read_yaml(resolve_path(entries[0]))
    if not isinstance(entries[0], dict):
        raise ConfigError("applications.args.llm_configs must hold a mapping with model_loading_config")
    args["llm_configs"] = entries
    entry: dict[str, Any] = entries[0]
    return entry


def _parse_override(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set takes key=value, got {override!r}")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError:
        return key, text


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    if key in HTTP_KEYS:
        _submapping(data, "http_options")[HTTP_KEYS[key]] = value
        return
    head, _, subkey = key.partition(".")
    if head in FILE_KEYS:
        _set_dotted(data, key, value)
        return
    if head in APP_KEYS:
        _set_dotted(_app_args(data), key, value)
        return
    llm = llm_entry(data)
    if MODEL_KEYS.get(key) == "model_source":
        _set_model(llm, value)
    elif key in MODEL_KEYS:
        _submapping(llm, "model_loading_config")[MODEL_KEYS[key]] = value
    elif ALIASES.get(key, key) in EngineConfig.model_fields:  # before Serve's options: both have max_queued_requests
        _set_engine(llm, key, value)
    elif key in DEPLOYMENT_OPTIONS:
        _submapping(llm, "deployment_config")[key] = value
    elif head == "speculative_config" and subkey in SPECULATIVE_CONFIG:
        _set_engine(llm, SPECULATIVE_CONFIG[subkey], convert_speculative_value(subkey, value))
    elif key == "accelerator_type":
        llm[key] = value
    elif head == "engine_kwargs" and ALIASES.get(subkey, subkey) in EngineConfig.model_fields:
        _set_engine(llm, subkey, value)
    elif head in LLMConfig.model_fields and subkey:
        _set_dotted(llm, key, value)
    else:
        known_keys = [
            *EngineConfig.model_fields,
            *ALIASES,
            *HTTP_KEYS,
            *MODEL_KEYS,
            *DEPLOYMENT_OPTIONS,
            "accelerator_type",
            *APP_KEYS,
        ]
        raise ConfigError(f"unknown setting {key!r}{spelling_hint(key, known_keys)}")


def _set_model(llm: dict[str, Any], source: Any) -> None:
    """Set the target to `source`, a folder or hub name. If this is another target than before, remove the draft and the
    tokenizer of the old target, and set a new `model_id`.
    """
    loading_config = _submapping(llm, "model_loading_config")
    old_source = loading_config.get("model_source") or loading_config.get("model_id")
    loading_config["model_source"] = source
    if old_source is not None and resolve_path(str(old_source)) == resolve_path(str(source)):
        return
    loading_config.pop("tokenizer_source", None)
    loading_config["model_id"] = _served_name(resolve_path(str(source)))
    engine_kwargs = _submapping(llm, "engine_kwargs")
    for name in [k for k in engine_kwargs if ALIASES.get(k, k).startswith("speculative_")]:
        del engine_kwargs[name]
    for name in ("tokenizer", "tokenizer_path"):
        engine_kwargs.pop(name, None)


def _served_name(source: str) -> str:
    """Return the name under which the model at `source` is served: the hub name without a revision, or the name of the
    folder.
    """
    model = hub_model(source)
    return model.name if model is not None else name_of(str(Path(source).resolve())) or source


def _set_engine(llm: dict[str, Any], key: str, value: Any) -> None:
    """Set an engine setting and remove its other spellings. If this turns speculation off, remove all other settings of
    speculation.
    """
    engine_kwargs = _submapping(llm, "engine_kwargs")
    name = ALIASES.get(key, key)
    # Flatten speculative_config first, so that each setting has one place.
    nested = _submapping(engine_kwargs, "speculative_config", "engine_kwargs.speculative_config")
    del engine_kwargs["speculative_config"]
    for nested_key, nested_value in nested.items():
        engine_kwargs[SPECULATIVE_CONFIG.get(nested_key, f"speculative_config.{nested_key}")] = (
            convert_speculative_value(nested_key, nested_value)
        )
    for spelling in [other for other in engine_kwargs if ALIASES.get(other, other) == name]:
        del engine_kwargs[spelling]
    if name in SPECULATION_SWITCHES and value is None:
        for other in [k for k in engine_kwargs if ALIASES.get(k, k).startswith("speculative_")]:
            del engine_kwargs[other]
    # The value of EXPERT_PARALLEL_ALIAS is a boolean, that of ep_size a number, so the alias is kept.
    engine_kwargs[key if key == EXPERT_PARALLEL_ALIAS else name] = value


def _submapping(data: dict[str, Any], name: str, display_name: str = "") -> dict[str, Any]:
    """Return the mapping `name` of `data`; create it if it is missing or null."""
    mapping = data.get(name)
    if mapping is None:
        mapping = data[name] = {}
    if not isinstance(mapping, dict):
        raise ConfigError(f"{display_name or name} must be a mapping, got {mapping!r}")
    return mapping


def _set_dotted(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; missing mappings on the path are created."""
    *path, last = key.split(".")
    for name in path:
        mapping = data.get(name)
        if mapping is None:
            mapping = data[name] = {}
        if not isinstance(mapping, dict):
            raise ConfigError(f"unknown setting {key!r}: {name!r} is a value, not a mapping")
        data = mapping
    data[last] = value


def _app_args(data: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the only application in a Serve config; create them if they are missing."""
    applications = data.setdefault("applications", [{}])
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError("applications must be a list with one entry, the application to serve")
    return _submapping(applications[0], "args", "applications.args")
