"""Applies overrides of single settings to a Serve config: the flags of `aerie serve` and its `--set key=value`."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from cluster.api.serve.settings import DEPLOYMENT_OPTIONS, AppSettings, LLMConfig, read_yaml, resolve_path
from cluster.arch.hub import hub_model, name_of
from cluster.config import ConfigError, EngineConfig, nearest
from cluster.config.aliases import ALIASES, EXPERT_SWITCH, SPECULATIVE_CONFIG, spelled

Override = str | tuple[str, Any]  # "key=value" with a value in YAML, or a key and its value

MODEL_KEYS = {"model": "model_source", "model_path": "model_source", "tokenizer": "tokenizer_source"} | {
    name: name for name in ("model_id", "model_source", "tokenizer_source")
}
HTTP_KEYS = {"http_host": "host", "http_port": "port"}
FILE_KEYS = ("proxy_location", "http_options", "logging_config")
APP_KEYS = tuple(name for name in AppSettings.model_fields if name != "llm_configs")
SWITCHES = ("speculative_algorithm", "speculative_draft_model_path")  # set to null, either turns speculation off


def lay_over(data: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Return a copy of a Serve config with the overrides applied. The model comes first, since another model removes
    the file's draft, tokenizer and name, which later overrides may set again.

    Raises:
        ConfigError: a key is unknown (the message has the nearest known key), or a part of the file has a wrong form.
    """
    made: dict[str, Any] = deepcopy(dict(data))
    pairs = [_read(override) if isinstance(override, str) else override for override in overrides]
    for key, value in sorted(pairs, key=lambda pair: MODEL_KEYS.get(pair[0]) != "model_source"):
        _set(made, key, value)
    return made


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


def _read(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set takes key=value, got {override!r}")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError:
        return key, text


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    if key in HTTP_KEYS:
        _inner(data, "http_options")[HTTP_KEYS[key]] = value
        return
    head, _, rest = key.partition(".")
    if head in FILE_KEYS:
        _descend(data, key, value)
        return
    if head in APP_KEYS:
        _descend(_app_args(data), key, value)
        return
    llm = llm_entry(data)
    if MODEL_KEYS.get(key) == "model_source":
        _set_model(llm, value)
    elif key in MODEL_KEYS:
        _inner(llm, "model_loading_config")[MODEL_KEYS[key]] = value
    elif ALIASES.get(key, key) in EngineConfig.model_fields:  # before Serve's options: both have max_queued_requests
        _set_engine(llm, key, value)
    elif key in DEPLOYMENT_OPTIONS:
        _inner(llm, "deployment_config")[key] = value
    elif head == "speculative_config" and rest in SPECULATIVE_CONFIG:
        _set_engine(llm, SPECULATIVE_CONFIG[rest], spelled(rest, value))
    elif key == "accelerator_type":
        llm[key] = value
    elif head == "engine_kwargs" and ALIASES.get(rest, rest) in EngineConfig.model_fields:
        _set_engine(llm, rest, value)
    elif head in LLMConfig.model_fields and rest:
        _descend(llm, key, value)
    else:
        known = [
            *EngineConfig.model_fields,
            *ALIASES,
            *HTTP_KEYS,
            *MODEL_KEYS,
            *DEPLOYMENT_OPTIONS,
            "accelerator_type",
            *APP_KEYS,
        ]
        raise ConfigError(f"unknown setting {key!r}{nearest(key, known)}")


def _set_model(llm: dict[str, Any], folder: Any) -> None:
    """Set the target to `folder`, a folder or hub name. Unless it is the same target as before, remove the draft, the
    tokenizer and the name of the old one.
    """
    loading = _inner(llm, "model_loading_config")
    before = loading.get("model_source") or loading.get("model_id")
    loading["model_source"] = folder
    if before is not None and resolve_path(str(before)) == resolve_path(str(folder)):
        return
    loading.pop("tokenizer_source", None)
    loading["model_id"] = _name_of(resolve_path(str(folder)))
    engine = _inner(llm, "engine_kwargs")
    for name in [k for k in engine if ALIASES.get(k, k).startswith("speculative_")]:
        del engine[name]
    for name in ("tokenizer", "tokenizer_path"):
        engine.pop(name, None)


def _name_of(source: str) -> str:
    """Return the name under which the model is served: its hub name without a revision, or its folder's name."""
    model = hub_model(source)
    return model.name if model is not None else name_of(str(Path(source).resolve())) or source


def _set_engine(llm: dict[str, Any], key: str, value: Any) -> None:
    """Set an engine setting and remove its other spellings. Turning speculation off removes all settings of it."""
    engine = _inner(llm, "engine_kwargs")
    name = ALIASES.get(key, key)
    # Flatten speculative_config first, so that each setting has one place.
    nested = _inner(engine, "speculative_config", "engine_kwargs.speculative_config")
    del engine["speculative_config"]
    for sub, sub_value in nested.items():
        engine[SPECULATIVE_CONFIG.get(sub, f"speculative_config.{sub}")] = spelled(sub, sub_value)
    for spelling in [other for other in engine if ALIASES.get(other, other) == name]:
        del engine[spelling]
    if name in SWITCHES and value is None:
        for other in [k for k in engine if ALIASES.get(k, k).startswith("speculative_")]:
            del engine[other]
    engine[key if key == EXPERT_SWITCH else name] = value  # EXPERT_SWITCH is a boolean, ep_size a number


def _inner(data: dict[str, Any], name: str, shown: str = "") -> dict[str, Any]:
    """Return the mapping `name` of `data`; create it if it is missing or null."""
    inner = data.get(name)
    if inner is None:
        inner = data[name] = {}
    if not isinstance(inner, dict):
        raise ConfigError(f"{shown or name} must be a mapping, got {inner!r}")
    return inner


def _descend(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; missing mappings on the path are created."""
    *path, last = key.split(".")
    for part in path:
        inner = data.get(part)
        if inner is None:
            inner = data[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"unknown setting {key!r}: {part!r} is a value, not a mapping")
        data = inner
    data[last] = value


def _app_args(data: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the only application; create them if they are missing."""
    applications = data.setdefault("applications", [{}])
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError("applications must be a list with one entry, the application to serve")
    return _inner(applications[0], "args", "applications.args")
