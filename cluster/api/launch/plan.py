"""The plan of `aerie serve`: a Serve config with the overrides of flags and `--set`, checked before anything starts."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from cluster.api.core.api_keys import ApiKeys, check_exposure
from cluster.api.launch.overlay import Override, apply_overrides, llm_entry
from cluster.api.serve.model_sources import pin_hub_models
from cluster.api.serve.settings import AppSettings, parse, read_yaml, resolve_engine_paths, resolve_path
from cluster.arch.hub import header_folders
from cluster.arch.resolve import check_models
from cluster.config import ConfigError, EngineConfig, Settings, as_config_error
from cluster.config.aliases import ALIASES
from cluster.paths.checkout import DEMO_CONFIG, demo_path

LOCAL_DEPLOYMENT = {"graceful_shutdown_timeout_s": 10, "max_constructor_retry_count": 1}
"""Options for a model that is served without a config file: Ctrl-C waits at most 10 s for open streams, and a failed
start is not repeated.
"""


class HttpOptions(Settings):
    """Serve's HTTP options: the address and port of the proxy, and its timeouts."""

    host: str = Field(default="127.0.0.1", description="address to listen on; `0.0.0.0` is all of them")
    port: int = Field(default=8000, ge=1, le=65535, description="port to listen on")
    keep_alive_timeout_s: int = Field(default=90, ge=1, description="how long an idle connection is kept open")
    request_timeout_s: float | None = Field(
        default=None, gt=0, description="longest time of a call, the whole stream included; unset: no limit"
    )


class ApplicationEntry(Settings):
    """One entry of a Serve config's `applications`."""

    name: str = Field(default="aerie", description="what Serve and the log call the application")
    route_prefix: Literal["/"] = Field(default="/", description="`aerie serve` serves only at the root path")
    import_path: Literal["cluster.api.app:build_openai_app"] = Field(
        default="cluster.api.app:build_openai_app", description="what builds the application"
    )
    args: dict[str, Any] = Field(default_factory=dict, description="settings of the application, see above")


class ServeFile(Settings):
    """The parts of a Serve config that `aerie serve` honours."""

    proxy_location: Literal["HeadOnly", "EveryNode"] = Field(
        default="HeadOnly", description="the nodes on which Serve runs a proxy; has an effect only with `--address`"
    )
    http_options: HttpOptions = Field(default_factory=HttpOptions, description="where to listen, see below")
    logging_config: dict[str, Any] = Field(
        default_factory=lambda: {"enable_access_log": False},
        description="settings of Serve's own log, as Ray documents them",
    )
    applications: list[ApplicationEntry] = Field(min_length=1, max_length=1, description="exactly one entry, see below")


@dataclass(frozen=True, slots=True)
class ServePlan:
    """Everything that `aerie serve` needs, validated. `engine` holds the settings of the engine with absolute paths and
    pinned hub names. If `keys` is None, the server has no API keys.
    """

    file: ServeFile
    settings: AppSettings
    engine: EngineConfig
    keys: ApiKeys | None
    unused_draft_note: str = ""  # a message for the user if the config's draft is not used

    @property
    def http(self) -> HttpOptions:
        """The HTTP options."""
        return self.file.http_options

    @property
    def url(self) -> str:
        """The URL of the server for clients on this machine."""
        host = "127.0.0.1" if self.http.host in ("0.0.0.0", "::") else self.http.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.http.port}"

    @property
    def replicas(self) -> int:
        """The number of replicas that start first: the fixed number, or with autoscaling the initial number, or the
        minimum number if no initial number is set; at least 1.
        """
        fixed = self.settings.llm.fixed_replicas
        scaling = self.settings.llm.deployment_config.get("autoscaling_config") or {}
        count = fixed if fixed is not None else scaling.get("initial_replicas") or scaling.get("min_replicas")
        return max(1, int(count or 1))

    def resources(self, name: str, gpus: float = 0.0) -> float:
        """Return how much of the Ray resource `name` the ranks of the first replicas need together, in a cluster with
        `gpus` GPUs. The extra replicas of a redeploy are not counted.
        """
        layout = self.settings.llm.layout(self.settings.llm.device(gpus)[0])
        return self.replicas * sum(bundle.get(name, 0.0) for bundle in layout.bundles)

    def check_resources(self, available: Mapping[str, float]) -> None:
        """Check that the ranks need no more of any resource in `available` than is there. Resources that are not in
        `available` are not checked.

        Raises:
            ConfigError: there is too little of a resource; the message names the resource.
        """
        for name, available_amount in available.items():
            required_amount = self.resources(name, available.get("GPU", 0.0))
            if required_amount > available_amount:
                remedy = "lower tp_size or num_replicas" if available_amount else "set device to cpu"
                raise ConfigError(
                    f"{self.replicas} replica(s) of {self.engine.tp_size} rank(s) need {required_amount:g} {name}, and "
                    f"this machine has {available_amount:g}; {remedy}, change placement_group_config, or give the "
                    "--address of a cluster that has them"
                )


def make_plan(config: str | None, overrides: Sequence[Override], model: str | None = None) -> ServePlan:
    """Return the plan: read the config, apply the overrides, and check settings and models.

    `model` is the folder or hub name of a model to serve instead of the config's model. If `config` is None, the
    default settings apply; if `model` is None too, the demo's config is served. Hub names are resolved to commits. For
    hub models, this downloads the configs and the headers of the weight files, but not the weights.

    Raises:
        ConfigError: a setting or model cannot be served; the message names the setting.
    """
    if model is not None:
        overrides = [("model_source", existing_path_or_name(model)), *overrides]
    data = _base_config(config, model)
    if not isinstance(data, Mapping):
        raise ConfigError(f"config {config!r} must be a mapping with http_options and applications")
    merged = apply_overrides(data, overrides)
    try:
        file = ServeFile.model_validate(merged)
    except ValidationError as error:
        raise as_config_error(error) from None
    settings = parse(file.applications[0].args)
    unused_draft_note = (
        _unused_draft_note(data, resolve_engine_paths(settings.llm.engine_config())) if overrides else ""
    )
    settings = pin_hub_models(settings)
    engine = resolve_engine_paths(settings.llm.engine_config())
    with header_folders(engine) as outlined_config:
        draft = outlined_config.speculative_draft_model_path
        if draft is not None and not any((Path(draft) / name).is_file() for name in ("config.json", "params.json")):
            raise ConfigError(f"speculative_draft_model_path {draft!r} has no config.json; give the folder of a draft")
        check_models(outlined_config)
    keys = ApiKeys.load(settings.api_keys_file)
    check_exposure(file.http_options.host, keys, settings.allow_unauthenticated)
    return ServePlan(file, settings, engine, keys, unused_draft_note)


def existing_path_or_name(folder: str) -> str:
    """Return `folder`, a text from the command line, as an absolute path if this path exists. Otherwise return it
    unchanged, because it may be a hub name, or a path that `resolve_path` finds.
    """
    return str(Path(folder).resolve()) if Path(folder).exists() else folder


def _base_config(config: str | None, model: str | None) -> Any:
    """Return the config to which overrides are applied: the file `config`; or the defaults if only a model is given; or
    the demo's config.
    """
    if config is not None:
        return read_yaml(config)
    if model is not None:
        llm = {"deployment_config": dict(LOCAL_DEPLOYMENT)}
        return {"applications": [{"args": {"llm_configs": [llm]}}]}
    return read_yaml(demo_path(DEMO_CONFIG, "give a model, aerie serve MODEL, or --config FILE"))


def _unused_draft_note(data: Mapping[str, Any], engine: EngineConfig) -> str:
    """Return a note if the config's draft is not used because another target is served; otherwise an empty string."""
    llm = llm_entry(apply_overrides(data, []))
    source = (llm.get("model_loading_config") or {}).get("model_source")
    engine_kwargs = llm.get("engine_kwargs") or {}
    nested = engine_kwargs.get("speculative_config")
    flat_drafts = (
        value for name, value in engine_kwargs.items() if ALIASES.get(name, name) == "speculative_draft_model_path"
    )
    draft = nested.get("model") if isinstance(nested, Mapping) else next(flat_drafts, None)
    if (
        draft is None
        or engine.speculative_draft_model_path is not None
        or resolve_path(str(source)) == engine.model_path
    ):
        return ""
    return f"the config's draft {draft!r} belongs to {source!r} and is not used; --draft sets another"


def check_port(http: HttpOptions) -> None:
    """Check that the proxy can listen on the address and port.

    Raises:
        ConfigError: the proxy cannot listen there; the message names http_host or http_port.
    """
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((http.host, http.port))
        except socket.gaierror as error:
            raise ConfigError(f"http_host {http.host!r} is not an address: {error.strerror}") from None
        except OSError as error:
            raise ConfigError(
                f"http_port {http.port} on {http.host} cannot be used: {error.strerror}; set another http_port"
            ) from None
