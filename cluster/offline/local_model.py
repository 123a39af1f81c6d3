"""The adapter that lets the REST routes' parsing code read requests for an engine of this process."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

from cluster.api.core.adapter import CoreRequest, GenerateCall
from cluster.api.core.grammars import Grammars
from cluster.api.core.limits import ModelInfo, RequestLimits
from cluster.api.core.tokenizer import ChatTokenizer, ParserNames
from cluster.api.http.calls import prepare
from cluster.arch.generation import sampling_defaults
from cluster.config.resolved import tokenizer_folder
from cluster.engine.engine import Engine

T = TypeVar("T")
SamplingDefaults = Literal["model", "openai"]


class LocalModel:
    """Implements the protocol `cluster.api.core.service.ServedModel` for one engine of this process: it has the model's
    properties and limits, the tokenizer and the grammar compiler. Any thread may use it.
    """

    def __init__(
        self, engine: Engine, parsers: ParserNames = (None, None), defaults: SamplingDefaults = "model"
    ) -> None:
        """Read the tokenizer and the chat template, if the model has a tokenizer. `parsers` are the settings
        tool_call_parser and reasoning_parser; `defaults` is the setting sampling_defaults.

        Raises:
            ConfigError: the model's tokenizer or chat template cannot be used.
        """
        info = engine.info()
        path = info.config.model_path
        self.tokenizer: ChatTokenizer | None = None
        if engine.tokenizer is not None:
            self.tokenizer = ChatTokenizer.load(tokenizer_folder(info.config), parsers)
        self.model = ModelInfo(
            model_id=path,
            context_length=info.context_length,
            vocab_size=info.vocab_size,
            created=0,
            kv_cache_tokens=info.max_request_tokens,
            eos_token_ids=info.eos_token_ids,
            sampling_defaults=sampling_defaults(path) if defaults == "model" else {},
        )
        self.limits = RequestLimits.of(info.context_length)
        self.grammars = Grammars(self.tokenizer, self.model)
        self._loop = _LoopThread()

    def prepare_call(self, core_request: CoreRequest) -> GenerateCall:
        """Return a parsed request as a call for the engine: the sequences to generate, and the formatter of the answer.

        Raises:
            ApiError: the request cannot be served; the message names the field.
        """
        with core_request.origins.translate_errors():
            return self._loop.run(prepare(self, self.limits, core_request, 0))

    def close(self) -> None:
        """End the process that compiles grammars, and the event loop's thread."""
        self.grammars.close()
        self._loop.close()


class _LoopThread:
    """An event loop in a separate thread. The caller's thread cannot be used: it may already run a loop (as in a
    notebook), and tasks must survive between two calls of `run`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="aerie-offline", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` in the loop, wait for it, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Cancel all tasks and end the thread. The garbage collector may call this in any thread."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        if threading.current_thread() is not self._thread:  # a thread cannot join itself
            self._thread.join()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _stop(self) -> None:
        other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in other_tasks:
            task.cancel()
        await asyncio.gather(*other_tasks, return_exceptions=True)
        self._loop.stop()
