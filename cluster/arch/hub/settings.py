"""The settings of an engine that may name models of a hub, and what becomes of them: a commit, then a folder."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from cluster.arch.hub.names import SCHEME, HubModel, hub_model
from cluster.arch.hub.outline import outline
from cluster.arch.hub.progress import Check
from cluster.arch.hub.snapshot import described, resolved, whole
from cluster.arch.resolve import resolve_models
from cluster.config import EngineConfig

WITH_WEIGHTS = ("model_path", "speculative_draft_model_path")
NAMES = (*WITH_WEIGHTS, "tokenizer_path")


def hub_models(config: EngineConfig) -> dict[str, HubModel]:
    """The settings that name a model of a hub and not a folder, by name."""
    given = {name: getattr(config, name) for name in NAMES}
    found = {name: hub_model(text) for name, text in given.items() if text is not None}
    return {name: model for name, model in found.items() if model is not None}


def is_pinned(config: EngineConfig) -> bool:
    """Whether any setting names a model of a hub as `pin` writes it; the network and the disk are not asked."""
    return any(str(getattr(config, name)).startswith(SCHEME) for name in NAMES)


def pin(config: EngineConfig) -> EngineConfig:
    """The settings with every name of a hub resolved to a commit, so that all processes that get them load the same. A
    name that several settings give is resolved once.

    Raises:
        ConfigError: there is no such model or revision, or neither the hub nor the cache can tell.
    """
    commits = {model: str(resolved(model)) for model in {*hub_models(config).values()}}
    return _with(config, lambda name, model: commits[model])


def describe(config: EngineConfig) -> EngineConfig:
    """The settings with a folder of this node for every name of a hub; it holds all that is served but the weights.

    Raises:
        ConfigError: the files cannot be had.
    """
    return _with(config, lambda name, model: str(described(model).folder))


def fetch(config: EngineConfig, check: Check | None = None) -> EngineConfig:
    """The settings with a folder of this node for every name of a hub; it holds all that is served.

    What the cache lacks is downloaded, by one process of the node while the others wait. Models that cannot be served
    are refused before that, by their configs and headers. `check` is called now and then during a download, and may
    raise to end it.

    Raises:
        ConfigError: the files cannot be had, or the models cannot be served.
    """
    if not hub_models(config):
        return config
    config = pin(config)
    with outlined(config) as seen:
        resolve_models(seen)

    def folder(name: str, model: HubModel) -> str:
        return str((whole(model, check) if name in WITH_WEIGHTS else described(model)).folder)

    return _with(config, folder)


def folder_of(source: str, *, weights: bool = True) -> str:
    """The folder `source` or, where that is a name on a hub, a folder of this node with the model's files: all that are
    served, or without `weights` the others.

    Raises:
        ConfigError: the files cannot be had.
    """
    model = hub_model(source)
    return source if model is None else str((whole if weights else described)(model).folder)


@contextmanager
def outlined(config: EngineConfig) -> Iterator[EngineConfig]:
    """The settings with folders to read configs and headers from, for as long as the block runs; see `outline`.

    Raises:
        ConfigError: the files cannot be had.
    """
    with ExitStack() as stack:

        def folder(name: str, model: HubModel) -> str:
            if name in WITH_WEIGHTS:
                return stack.enter_context(outline(model))
            return str(described(model).folder)

        yield _with(config, folder)


def _with(config: EngineConfig, place: Callable[[str, HubModel], str]) -> EngineConfig:
    return config.model_copy(update={name: place(name, model) for name, model in hub_models(config).items()})
