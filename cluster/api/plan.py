"""What `aerie serve` will do, settled before anything is started: a Serve config in, with `--set` laid over it."""

import socket
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from cluster.api.settings import (
    CHECKOUT,
    DEPLOYMENT_OPTIONS,
    AppSettings,
    LLMConfig,
    parse,
    read_yaml,
    resolve_engine_paths,
)
from cluster.arch.split import check_models
from cluster.config import (
    ALIASES,
    SPECULATIVE_CONFIG,
    ConfigError,
    EngineConfig,
    Settings,
    as_config_error,
    nearest,
)

BUILDER = "cluster.api.app:build_openai_app"
DEFAULT_CONFIG = CHECKOUT / "deploy" / "local.yaml"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MODEL_KEYS = {"model": "model_source", "model_path": "model_source", "tokenizer": "tokenizer_source"} | {
    name: name for name in ("model_id", "model_source", "tokenizer_source")
}
HTTP_KEYS = {"http_host": "host", "http_port": "port"}
APP_KEYS = tuple(name for name in AppSettings.model_fields if name != "llm_configs")
OWN_KEYS = ("allow_unauthenticated", "accelerator_type")


class HttpOptions(Settings):
    """Where the proxy listens, and the rest of Serve's HTTP options."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    keep_alive_timeout_s: int = Field(default=90, ge=1)
    request_timeout_s: float | None = Field(default=None, gt=0)


class ApplicationEntry(Settings):
    """One entry of a Serve config's `applications`."""

    name: str = "aerie"
    route_prefix: Literal["/"] = "/"
    import_path: Literal["cluster.api.app:build_openai_app"] = "cluster.api.app:build_openai_app"
    args: dict[str, Any] = Field(default_factory=dict)


class ServeFile(Settings):
    """The parts of a Serve config that `aerie serve` honours."""

    proxy_location: Literal["HeadOnly", "EveryNode"] = "HeadOnly"
    http_options: HttpOptions = Field(default_factory=HttpOptions)
    logging_config: dict[str, Any] = Field(default_factory=lambda: {"enable_access_log": False})
    applications: list[ApplicationEntry] = Field(min_length=1, max_length=1)
    allow_unauthenticated: bool = False


@dataclass(frozen=True, slots=True)
class ServePlan:
    """Everything that `aerie serve` needs, validated."""

    file: ServeFile
    settings: AppSettings
    engine: EngineConfig

    @property
    def http(self) -> HttpOptions:
        """Where to listen."""
        return self.file.http_options

    @property
    def url(self) -> str:
        """Where clients find the server on this machine."""
        host = "127.0.0.1" if self.http.host in ("0.0.0.0", "::") else self.http.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.http.port}"

    @property
    def replicas(self) -> int:
        """How many replicas start: a number that is given, else the least that autoscaling allows."""
        options = self.settings.llm.deployment_config
        given = options.get("num_replicas")
        scaling = options.get("autoscaling_config") or {}
        count = given if isinstance(given, int) else scaling.get("initial_replicas") or scaling.get("min_replicas")
        return max(1, int(count or 1))

    def resources(self, name: str) -> float:
        """How much of a resource the gangs of the first replicas ask for together, a redeploy's surge not counted."""
        return self.replicas * sum(bundle.get(name, 0.0) for bundle in self.settings.llm.layout().bundles)

    def check_room(self, available: Mapping[str, float]) -> None:
        """Refuse gangs that there is too little of a resource for, of those that `available` tells about.

        Raises:
            ConfigError: naming the resource.
        """
        for name, there in available.items():
            if self.resources(name) > there:
                raise ConfigError(
                    f"{self.replicas} replica(s) of {self.engine.tp_size} rank(s) need {self.resources(name):g} "
                    f"{name}, and this machine has {there:g}; lower tp_size or num_replicas, change "
                    "placement_group_config, or give the --address of a cluster that has them"
                )


def make_plan(config: str | None, overrides: Sequence[str]) -> ServePlan:
    """Read the config, lay the overrides over it, and refuse what is known to fail.

    Raises:
        ConfigError: naming the setting.
    """
    if config is None and not DEFAULT_CONFIG.is_file():
        raise ConfigError("no --config given, and this installation has no deploy/local.yaml; give --config FILE")
    data = read_yaml(config or str(DEFAULT_CONFIG))
    if not isinstance(data, Mapping):
        raise ConfigError(f"config {config!r} must be a mapping with http_options and applications")
    data = lay_over(data, overrides)
    try:
        file = ServeFile.model_validate(data)
    except ValidationError as error:
        raise as_config_error(error) from None
    settings = parse(file.applications[0].args)
    engine = resolve_engine_paths(settings.llm.engine_config())
    draft = engine.speculative_draft_model_path
    if draft is not None and not (Path(draft) / "config.json").is_file():
        raise ConfigError(f"speculative_draft_model_path {draft!r} has no config.json; give the folder of a draft")
    check_models(engine)
    if file.http_options.host not in LOOPBACK and not file.allow_unauthenticated:
        raise ConfigError(
            f"http_host {file.http_options.host!r} is reachable from other machines and there are no API keys; "
            "use 127.0.0.1 behind a gateway, or say --set allow_unauthenticated=true"
        )
    return ServePlan(file, settings, engine)


def check_port(http: HttpOptions) -> None:
    """Refuse a port that somebody listens on.

    Raises:
        ConfigError: naming http_host or http_port.
    """
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((http.host, http.port))
        except socket.gaierror as error:
            raise ConfigError(f"http_host {http.host!r} is not an address: {error.strerror}") from None
        except OSError as error:
            raise ConfigError(f"http_port {http.port} on {http.host} cannot be used: {error.strerror}") from None


def lay_over(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of a Serve config with `key=value` settings laid over it; values are read as YAML.

    Raises:
        ConfigError: a key that nobody knows, with the nearest one.
    """
    made: dict[str, Any] = deepcopy(dict(data))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes key=value, got {override!r}")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        _set(made, key, value)
    return made


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    if key in HTTP_KEYS:
        data.setdefault("http_options", {})[HTTP_KEYS[key]] = value
        return
    if key == "allow_unauthenticated":
        data[key] = value
        return
    head, _, rest = key.partition(".")
    if head in ServeFile.model_fields and head != "applications" and rest:
        _descend(data, key, value)
        return
    if head in APP_KEYS:
        _descend(_app_args(data), key, value)
        return
    llm = _llm_entry(data)
    engine = llm.setdefault("engine_kwargs", {})
    if key in MODEL_KEYS:
        llm.setdefault("model_loading_config", {})[MODEL_KEYS[key]] = value
    elif key in DEPLOYMENT_OPTIONS:
        llm.setdefault("deployment_config", {})[key] = value
    elif ALIASES.get(key, key) in EngineConfig.model_fields:
        _set_engine(engine, key, value)
    elif head == "speculative_config" and rest in SPECULATIVE_CONFIG:
        _set_engine(engine, SPECULATIVE_CONFIG[rest], value.upper() if rest == "method" else value)
    elif key == "accelerator_type":
        llm[key] = value
    elif head == "engine_kwargs" and ALIASES.get(rest, rest) in EngineConfig.model_fields:
        _set_engine(engine, rest, value)
    elif head in LLMConfig.model_fields and rest:
        _descend(llm, key, value)
    else:
        known = [
            *EngineConfig.model_fields,
            *ALIASES,
            *HTTP_KEYS,
            *MODEL_KEYS,
            *DEPLOYMENT_OPTIONS,
            *OWN_KEYS,
            *APP_KEYS,
        ]
        raise ConfigError(f"unknown setting {key!r}{nearest(key, known)}")


def _set_engine(engine: dict[str, Any], key: str, value: Any) -> None:
    """Set an engine setting once, whatever spelling the file used; speculation off drops the file's tree as well."""
    name = ALIASES.get(key, key)
    nested = dict(engine.pop("speculative_config", None) or {})
    for sub, sub_value in nested.items():
        engine[SPECULATIVE_CONFIG.get(sub, f"speculative_config.{sub}")] = (
            sub_value.upper() if sub == "method" and isinstance(sub_value, str) else sub_value
        )
    for spelling in [other for other in engine if ALIASES.get(other, other) == name]:
        del engine[spelling]
    if name == "speculative_algorithm" and value is None:
        for other in [k for k in engine if ALIASES.get(k, k).startswith("speculative_")]:
            del engine[other]
    engine[name] = value


def _descend(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, making the mappings on the way."""
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
    """The arguments of the application, made when they are missing."""
    args: dict[str, Any] = data.setdefault("applications", [{}])[0].setdefault("args", {})
    return args


def _llm_entry(data: dict[str, Any]) -> dict[str, Any]:
    """The one entry of llm_configs, made when it is missing and read when it is the path of a file."""
    entries = _app_args(data).setdefault("llm_configs", [{}])
    if isinstance(entries[0], str):
        entries[0] = read_yaml(entries[0])
    entry: dict[str, Any] = entries[0]
    return entry
