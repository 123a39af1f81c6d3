"""Loads the parts that the REST routes of a replica need. The ranks can start meanwhile."""

import asyncio
import importlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cluster.config import EngineConfig
from cluster.config.resolved import tokenizer_folder

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json")  # only the first can be read; see `load_rest`
First = TypeVar("First")
Second = TypeVar("Second")


async def gather_or_cancel(
    first: Coroutine[Any, Any, First], second: Coroutine[Any, Any, Second]
) -> tuple[First, Second]:
    """Return the results of both coroutines. If one fails, cancel the other and raise at once."""
    tasks = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        first_result, second_result = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
    return first_result, second_result


class RestParts(NamedTuple):
    """The parts of the REST routes: `make_app`, the tokenizer (or None), and classes whose import takes long."""

    make_app: Any
    tokenizer: Any
    model_info_class: Any
    grammars_class: Any
    drain_class: Any


def load_rest(config: EngineConfig, parsers: tuple[str | None, str | None]) -> RestParts:
    """Return the parts of the REST routes. `parsers` is `AppSettings.parsers`. Call this in a thread, because the
    imports take seconds. If the model has no tokenizer file, `tokenizer` is None.

    Raises:
        ConfigError: the tokenizer or its chat template cannot be loaded.
    """
    make_app = importlib.import_module("cluster.api.http.routes").make_app
    drain_class = importlib.import_module("cluster.api.http.middleware").Drain
    model_info_class = importlib.import_module("cluster.api.core.limits").ModelInfo
    grammars_class = importlib.import_module("cluster.api.core.grammars").Grammars
    tokenizer_class = importlib.import_module("cluster.api.core.tokenizer").ChatTokenizer
    folder = tokenizer_folder(config)
    paths = (Path(folder) / name for name in TOKENIZER_FILES)
    # If the file has another format or is a broken symlink, `tokenizer_class.load` raises an error. This is better than
    # serving only token ids.
    has_tokenizer = config.tokenizer_path is not None or any(path.is_symlink() or path.is_file() for path in paths)
    if not has_tokenizer:
        logger.warning("%s has no tokenizer: only token ids are served; set tokenizer_path to serve texts", folder)
    return RestParts(
        make_app,
        tokenizer_class.load(folder, parsers) if has_tokenizer else None,
        model_info_class,
        grammars_class,
        drain_class,
    )
