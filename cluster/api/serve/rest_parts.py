"""Loads the parts that a replica's REST routes need, while its gang starts."""

import asyncio
import importlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cluster.config import EngineConfig
from cluster.config.resolved import tokenizer_folder

logger = logging.getLogger(__name__)

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json")  # only the first can be read; see `load_rest`
One = TypeVar("One")
Other = TypeVar("Other")


async def together(one: Coroutine[Any, Any, One], other: Coroutine[Any, Any, Other]) -> tuple[One, Other]:
    """Return the results of both coroutines. If one fails, cancel the other and raise at once."""
    tasks = asyncio.ensure_future(one), asyncio.ensure_future(other)
    try:
        first, second = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
    return first, second


class Rest(NamedTuple):
    """The parts of the REST routes: `make_app`, the tokenizer (or None), and classes that are imported late."""

    make_app: Any
    tokenizer: Any
    model_info: Any
    grammars: Any
    drain: Any


def load_rest(config: EngineConfig, parsers: tuple[str | None, str | None]) -> Rest:
    """Return the parts of the REST routes, for `AppSettings.parsers`. Call it in a thread: the imports take seconds."""
    make_app = importlib.import_module("cluster.api.http.routes").make_app
    drain = importlib.import_module("cluster.api.http.middleware").Drain
    model_info = importlib.import_module("cluster.api.core.limits").ModelInfo
    grammars = importlib.import_module("cluster.api.core.grammars").Grammars
    tokenizer = importlib.import_module("cluster.api.core.tokenizer").ChatTokenizer
    folder = tokenizer_folder(config)
    there = (Path(folder) / name for name in TOKENIZERS)
    # With another format or a broken symlink, `tokenizer.load` below raises: better than serving token ids alone.
    has_tokenizer = config.tokenizer_path is not None or any(each.is_symlink() or each.is_file() for each in there)
    if not has_tokenizer:
        logger.warning("%s has no tokenizer: only token ids are served; set tokenizer_path to serve texts", folder)
    return Rest(make_app, tokenizer.load(folder, parsers) if has_tokenizer else None, model_info, grammars, drain)
