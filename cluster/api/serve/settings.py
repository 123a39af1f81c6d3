"""The arguments of the Serve application. Settings of Ray Serve LLM keep their names; unsupported ones are refused."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from cluster.actors.cluster_capacity import Layout, Strategy
from cluster.actors.placement import Device, check_gpu_shares, device_of, layout_of
from cluster.chat.formats.choose import canonical_parser_names
from cluster.config import ConfigError, EngineConfig, Settings, as_config_error, spelling_hint
from cluster.observability.logs import LogFormat, LogSettings, default_path
from cluster.paths.checkout import search_folders

# Settings of Ray Serve LLM that Aerie does not honour, with the reason for the error message.
UNSUPPORTED_SETTINGS: Mapping[str, str] = {
    "llm_engine": "the engine is Aerie's own",
    "lora_config": "LoRA adapters are not served",
    "server_cls": "the server class is fixed",
    "callback_config": "there are no initialisation hooks",
    "experimental_configs": "Aerie has no experimental settings",
    "accelerator_config": "use accelerator_type and placement_group_config",
    "ingress_cls_config": "the ingress is Aerie's own",
}
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z*]+")  # in the form of browsers: lower case, no path
DEPLOYMENT_OPTIONS = (
    "num_replicas",
    "max_ongoing_requests",
    "max_queued_requests",
    "backpressure_config",
    "autoscaling_config",
    "graceful_shutdown_wait_loop_s",
    "graceful_shutdown_timeout_s",
    "health_check_period_s",
    "health_check_timeout_s",
    "ray_actor_options",
    "max_replicas_per_node",
    "logging_config",
    "request_router_config",
    "max_constructor_retry_count",
    "rolling_update_percentage",
    "max_surge_percent",
)


# The router admits requests by tokens, so max_ongoing_requests is set too high to matter. A stream may run for minutes,
# so a replica gets time to finish its streams at shutdown, and on a redeploy its successor starts first.
DEPLOYMENT_DEFAULTS: dict[str, Any] = {
    "max_ongoing_requests": 10_000,
    "graceful_shutdown_wait_loop_s": 0.5,
    "graceful_shutdown_timeout_s": 600.0,
    "max_surge_percent": 100,
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 5.0,
    "max_constructor_retry_count": 3,
    "ray_actor_options": {"num_cpus": 0.5},
}


class ServingSettings(Settings):
    """Base of the settings here. A key of `UNSUPPORTED_SETTINGS` is refused with a message that gives the reason."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in data:
                if key in UNSUPPORTED_SETTINGS and key not in cls.model_fields:
                    raise ConfigError(f"setting {key!r} is not honoured: {UNSUPPORTED_SETTINGS[key]}; remove it")
        return data


class ModelLoadingConfig(ServingSettings):
    """The folders or hub names of the model and the tokenizer, and the model name that clients use."""

    model_id: str = Field(min_length=1, description="the name that clients ask for")
    model_source: str | None = Field(
        default=None,
        description="folder of the target, or its name on a hub, ORGANISATION/NAME or "
        "ORGANISATION/NAME@REVISION; unset: `model_id` is the folder or the name",
    )
    tokenizer_source: str | None = Field(
        default=None, description="folder of the tokenizer, or the name of a model on a hub; unset: the target's"
    )


class PlacementGroupConfig(ServingSettings):
    """The Ray resources of the ranks: `bundle_per_worker` for every rank alike, or `bundles`, one per rank."""

    bundle_per_worker: dict[str, float] | None = Field(
        default=None,
        description="Ray resources that each rank reserves, for example {CPU: 1, GPU: 1}; either this or "
        "bundles must be set",
    )
    bundles: list[dict[str, float]] | None = Field(
        default=None, description="Ray resources of each rank, one entry per rank"
    )
    strategy: Strategy = Field(default="PACK", description="how Ray spreads the ranks over nodes")
    wait_s: float | None = Field(
        default=None,
        ge=0,
        description="how long a gang (the ranks of one replica) waits for its resources; unset: 10 s if the nodes "
        "could never hold it; 30 s if others use the resources, plus the old replica's graceful_shutdown_timeout_s "
        "in a redeploy with max_surge_percent 0",
    )

    @model_validator(mode="after")
    def _check_bundles(self) -> Self:
        if (self.bundle_per_worker is None) == (self.bundles is None):
            raise ConfigError("placement_group_config needs bundle_per_worker or bundles, and not both")
        return self


class LLMConfig(ServingSettings):
    """One model and its deployment options."""

    model_loading_config: ModelLoadingConfig = Field(description="which model, see below")
    engine_kwargs: dict[str, Any] = Field(default_factory=dict, description="settings of the engine, see above")
    accelerator_type: str | None = Field(
        default=None, description="Ray's name of the GPU model on which the ranks must run, for example H100"
    )
    placement_group_config: PlacementGroupConfig | None = Field(
        default=None,
        description="the resources of the ranks, see below; unset: a CPU each, and a GPU where they use one",
    )
    deployment_config: dict[str, Any] = Field(
        default_factory=dict, description="options of the Serve deployment that owns the engine, see below"
    )
    runtime_env: dict[str, Any] = Field(default_factory=dict, description="Ray's runtime environment of the replicas")
    log_engine_metrics: Literal[True] = Field(
        default=True, description="may only be true, because /metrics always has the engine's metrics"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_options("deployment_config", self.deployment_config)
        self.engine_config()
        self.layout()
        self.device(0.0)
        return self

    def engine_config(self) -> EngineConfig:
        """Return the engine settings; `model_path` is the model's source, or its id if there is no source.

        Raises:
            ConfigError: an engine setting is unknown or wrong.
        """
        engine_kwargs = dict(self.engine_kwargs)
        loading_config = self.model_loading_config
        for name in ("tool_call_parser", "reasoning_parser"):
            if name in engine_kwargs:
                raise ConfigError(f"engine_kwargs must not set {name!r}; set it next to llm_configs")
        for name in ("model", "model_path"):
            if name in engine_kwargs:
                raise ConfigError(f"engine_kwargs must not set {name!r}; use model_loading_config.model_source")
        engine_kwargs["model_path"] = loading_config.model_source or loading_config.model_id
        if loading_config.tokenizer_source is not None:
            for name in ("tokenizer", "tokenizer_path"):
                if name in engine_kwargs:
                    raise ConfigError(f"model_loading_config.tokenizer_source is also set by engine_kwargs.{name}")
            engine_kwargs["tokenizer_path"] = loading_config.tokenizer_source
        return EngineConfig.from_kwargs(engine_kwargs)

    @property
    def fixed_replicas(self) -> int | None:
        """The fixed number of replicas, or None if Serve decides the number (autoscaling)."""
        num_replicas = self.deployment_config.get("num_replicas", 1)
        return (
            None
            if self.deployment_config.get("autoscaling_config") or not isinstance(num_replicas, int)
            else num_replicas
        )

    @property
    def min_replicas(self) -> int:
        """The smallest number of replicas that can run, at least 1. Each replica has one gang (its ranks)."""
        autoscaling = self.deployment_config.get("autoscaling_config")
        count = autoscaling.get("min_replicas", 1) if isinstance(autoscaling, Mapping) else self.fixed_replicas
        return max(1, count) if isinstance(count, int) else 1

    def device(self, gpus: float) -> tuple[Literal["cpu", "cuda"], str]:
        """Return the device of every rank in a cluster with `gpus` GPUs, and the reason for the choice.

        Raises:
            ConfigError: the device is cuda, and a bundle reserves no GPU, several, or (with several ranks) part of one.
        """
        placement = self.placement_group_config
        bundles = None if placement is None else placement.bundles or [placement.bundle_per_worker or {}]
        config = self.engine_config()
        try:
            device, reason = device_of(config.device, bundles, self.accelerator_type, gpus)
            if device == "cuda" and placement is not None:
                check_gpu_shares(placement.bundles or [placement.bundle_per_worker or {}] * config.tp_size)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return device, reason

    def layout(self, device: Device = "auto") -> Layout:
        """Return the layout of a gang (the ranks of one replica) on `device` (auto: the engine's setting), one bundle
        per rank. With max_surge_percent 0 a redeploy stops the old replica first. The gang then waits longer for its
        resources, because the old replica may need `graceful_shutdown_timeout_s` to finish its streams.
        """
        config = self.engine_config()
        options = {**DEPLOYMENT_DEFAULTS, **self.deployment_config}
        leaves_s = 0.0 if options["max_surge_percent"] else float(options["graceful_shutdown_timeout_s"])
        placement = self.placement_group_config
        try:
            layout = layout_of(
                config.tp_size,
                bundle_per_worker=placement.bundle_per_worker if placement else None,
                bundles=placement.bundles if placement else None,
                strategy=placement.strategy if placement else "PACK",
                device=config.device if device == "auto" else device,
                accelerator_type=self.accelerator_type,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        gangs, group = self.min_replicas, config.tp_size // config.attn_dp_size
        wait_s = placement.wait_s if placement else None
        return replace(layout, gangs=gangs, group_size=group, redeploy_wait_s=leaves_s, wait_s=wait_s)


class AppSettings(ServingSettings):
    """The application's arguments: the mapping `applications[].args` of a Serve config."""

    llm_configs: list[LLMConfig] = Field(description="exactly one entry, or the path of a YAML file with it")
    ingress: Literal["direct", "resilient"] = Field(
        default="direct",
        description="direct: the replica that owns the engine answers clients; resilient: further replicas do, which "
        "outlive it",
    )
    ingress_deployment_config: dict[str, Any] = Field(
        default_factory=dict, description="options of the deployment of a resilient ingress, see below"
    )
    log_file: str | None = Field(
        default=None,
        description="absolute path, the same on each node; unset: ~/.cache/aerie/logs/<application>.log; if "
        "`aerie serve` starts its own Ray, a new file for each start",
    )
    log_format: LogFormat = Field(default="text", description="lines as text, or one JSON object each")
    api_keys_file: str | None = Field(
        default=None,
        description="absolute path, the same on each node that has ingress replicas: the hashes of API keys",
    )
    allow_unauthenticated: bool = Field(
        default=False,
        description="true: start without API keys also on an address other than loopback, and serve everyone "
        "who reaches it",
    )
    page: bool = Field(default=True, description="a page at / that shows what the server does, and a playground")
    allowed_origins: list[str] = Field(
        default_factory=list,
        description="origins of web pages that may call the server from a browser (CORS), such as "
        "https://host; `*` means all",
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        default="model",
        description="defaults of temperature, top_p, top_k, min_p and repetition_penalty for requests without "
        "these fields; model: the values in generation_config.json if it has them; openai: 1, 1, "
        "none, none and 1",
    )
    tool_call_parser: str | None = Field(
        default=None,
        description="format in which the model writes tool calls (chat.md); unset: chosen by the chat template",
    )
    reasoning_parser: str | None = Field(
        default=None,
        description="format in which the model marks its reasoning (chat.md); unset: chosen by the chat template",
    )

    @model_validator(mode="before")
    @classmethod
    def _load_files(cls, data: Any) -> Any:
        """Replace each path of a YAML file in llm_configs by the content of the file, as Ray Serve LLM does."""
        if isinstance(data, Mapping) and isinstance(data.get("llm_configs"), str):
            data = {**data, "llm_configs": [data["llm_configs"]]}  # `serve run builder llm_configs=file.yaml`
        if isinstance(data, Mapping) and isinstance(data.get("llm_configs"), list):
            entries = [
                read_yaml(resolve_path(entry)) if isinstance(entry, str) else entry for entry in data["llm_configs"]
            ]
            data = {**data, "llm_configs": entries}
        return data

    @field_validator("log_file", "api_keys_file")
    @classmethod
    def _check_absolute(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None and not Path(path).is_absolute():
            raise ConfigError(f"{info.field_name} {path!r} must be an absolute path: processes in other folders use it")
        return path

    @model_validator(mode="after")
    def _check_parsers(self) -> Self:
        canonical_parser_names(self.tool_call_parser, self.reasoning_parser)
        return self

    @property
    def parsers(self) -> tuple[str | None, str | None]:
        """The names of the tool-call format and the reasoning format, in Aerie's spelling; None lets the model's chat
        template decide.
        """
        return canonical_parser_names(self.tool_call_parser, self.reasoning_parser)

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins: {origin!r} must be SCHEME://HOST or SCHEME://HOST:PORT in lower case, or *"
                )
        return origins

    @model_validator(mode="after")
    def _check_single_model(self) -> Self:
        if len(self.llm_configs) != 1:
            raise ConfigError(
                f"llm_configs must have exactly one entry, got {len(self.llm_configs)}; "
                "deploy further models as further applications"
            )
        _check_options("ingress_deployment_config", self.ingress_deployment_config)
        if self.ingress_deployment_config and self.ingress == "direct":
            raise ConfigError(
                "ingress_deployment_config needs ingress: resilient; with ingress: direct the replica that owns the "
                "gang is the ingress: set its options in deployment_config"
            )
        return self

    @property
    def llm(self) -> LLMConfig:
        """The only entry of `llm_configs`."""
        return self.llm_configs[0]

    @property
    def drain_timeout_s(self) -> float:
        """How many seconds the replicas that hold client connections wait for open calls at shutdown."""
        options = self.llm.deployment_config if self.ingress == "direct" else self.ingress_deployment_config
        return float({**DEPLOYMENT_DEFAULTS, **options}["graceful_shutdown_timeout_s"])

    def log(self, application: str) -> LogSettings:
        """Return the path and format of this application's log on this node."""
        return LogSettings(str(Path(self.log_file or default_path(application)).absolute()), self.log_format)


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    for key in options:
        if key not in DEPLOYMENT_OPTIONS:
            hint = "; use placement_group_config" if key.startswith("placement_group") else ""
            raise ConfigError(f"unknown setting '{name}.{key}'{hint or spelling_hint(key, list(DEPLOYMENT_OPTIONS))}")


def parse(args: Mapping[str, Any]) -> AppSettings:
    """Return the validated arguments of the application.

    Raises:
        ConfigError: one line per mistake, each naming its setting.
    """
    try:
        return AppSettings.model_validate(dict(args))
    except ValidationError as error:
        raise as_config_error(error) from None


def resolve_path(path: str) -> str:
    """Return a path of a config as an absolute path, found in AERIE_HOME, the working directory or the source checkout,
    in that order.

    The working directory alone is not enough, since `serve deploy` runs the application in another directory than its
    own. A path that exists in none of them is returned unchanged; it may be the name of a model on a hub.
    """
    if Path(path).is_absolute():
        return path
    for home in search_folders():
        if (home / path).exists():
            return str((home / path).resolve())
    return path


def resolve_engine_paths(config: EngineConfig) -> EngineConfig:
    """Return a copy of the config with its paths resolved on this machine (`resolve_path`)."""
    names = ("model_path", "tokenizer_path", "speculative_draft_model_path", "speculative_token_map")
    resolved = {name: resolve_path(value) for name in names if (value := getattr(config, name)) is not None}
    return config.model_copy(update=resolved)


def read_yaml(path: str) -> Any:
    """Return the content of a YAML file.

    Raises:
        ConfigError: the file cannot be read or is not YAML.
    """
    try:
        return yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config {path!r}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config {path!r} is not YAML: {error}") from None
