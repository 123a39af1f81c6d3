"""The engine settings that may name hub models. A name is first pinned to a commit, then replaced by a folder."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from cluster.arch.hub.names import SCHEME, HubModel, hub_model
from cluster.arch.hub.outline import header_folder
from cluster.arch.hub.progress import Check
from cluster.arch.hub.snapshot import fetch_all_files, fetch_config_files, resolve_commit
from cluster.arch.resolve import resolve_models
from cluster.config import EngineConfig

WEIGHT_SETTINGS = ("model_path", "speculative_draft_model_path")
MODEL_SETTINGS = (*WEIGHT_SETTINGS, "tokenizer_path")


def hub_models(config: EngineConfig) -> dict[str, HubModel]:
    """Return the hub models that the settings name, by name of the setting. Settings that name folders are left out."""
    sources = {name: getattr(config, name) for name in MODEL_SETTINGS}
    models = {name: hub_model(text) for name, text in sources.items() if text is not None}
    return {name: model for name, model in models.items() if model is not None}


def is_pinned(config: EngineConfig) -> bool:
    """Whether any setting names a hub model with the prefix hf://, as `pin` writes it. Uses neither network nor
    disk.
    """
    return any(str(getattr(config, name)).startswith(SCHEME) for name in MODEL_SETTINGS)


def pin(config: EngineConfig) -> EngineConfig:
    """Return the settings with every hub name resolved to a commit, so that all processes load the same files. If
    several settings hold the same name, the name is resolved once.

    Raises:
        ConfigError: the model or revision does not exist, or neither the hub nor the cache can tell.
    """
    commits = {model: str(resolve_commit(model)) for model in {*hub_models(config).values()}}
    return _replace_models(config, lambda name, model: commits[model])


def fetch_configs(config: EngineConfig) -> EngineConfig:
    """Return the settings with hub names replaced by folders on this node that hold all files except the weights.

    Raises:
        ConfigError: the files cannot be fetched.
    """
    return _replace_models(config, lambda name, model: str(fetch_config_files(model).folder))


def fetch(config: EngineConfig, check: Check | None = None) -> EngineConfig:
    """Return the settings with hub names replaced by folders on this node that hold all files. The folder for
    `tokenizer_path` may lack the weights.

    One process of the node downloads missing files, while other processes wait. Before the download, models that cannot
    be served are refused; their configs and headers show this. `check` is called regularly during the download, and may
    raise to end it.

    Raises:
        ConfigError: the files cannot be fetched, or the models cannot be served.
    """
    if not hub_models(config):
        return config
    config = pin(config)
    with header_folders(config) as header_config:
        resolve_models(header_config)

    def folder(name: str, model: HubModel) -> str:
        return str((fetch_all_files(model, check) if name in WEIGHT_SETTINGS else fetch_config_files(model)).folder)

    return _replace_models(config, folder)


def folder_of(source: str, *, weights: bool = True) -> str:
    """Return a folder on this node with a model's files. If `weights` is False, the folder may lack the weights.
    `source` is returned unchanged unless it is a hub name.

    Raises:
        ConfigError: the files cannot be fetched.
    """
    model = hub_model(source)
    return source if model is None else str((fetch_all_files if weights else fetch_config_files)(model).folder)


@contextmanager
def header_folders(config: EngineConfig) -> Iterator[EngineConfig]:
    """A context manager: yields the settings with every hub name replaced by a folder with configs and headers, as
    `header_folder` yields it. The folder for `tokenizer_path` may lack the headers.

    Raises:
        ConfigError: the files cannot be fetched.
    """
    with ExitStack() as stack:

        def folder(name: str, model: HubModel) -> str:
            if name in WEIGHT_SETTINGS:
                return stack.enter_context(header_folder(model))
            return str(fetch_config_files(model).folder)

        yield _replace_models(config, folder)


def _replace_models(config: EngineConfig, folder_of_model: Callable[[str, HubModel], str]) -> EngineConfig:
    return config.model_copy(update={name: folder_of_model(name, model) for name, model in hub_models(config).items()})
