"""A model in this process, as the code of the REST routes sees it: that code reads the requests of the offline door."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

from cluster.api.core.grammars import Grammars
from cluster.api.core.service import ModelInfo, RequestLimits
from cluster.api.core.tokenizer import ChatTokenizer, Parsers
from cluster.api.http.api_adapters import CoreRequest
from cluster.api.http.calls import GenerateCall, understand
from cluster.arch.generation import sampling_defaults
from cluster.engine.engine import Engine

T = TypeVar("T")
SamplingDefaults = Literal["model", "openai"]


class LocalModel:
    """The model of an engine, its tokenizer and what compiles grammars for it; see `cluster.api.core.service.Served`.
    For any thread.
    """

    def __init__(self, engine: Engine, parsers: Parsers = (None, None), defaults: SamplingDefaults = "model") -> None:
        """Read the tokenizer and the chat template. `parsers` and `defaults` are the settings of the application:
        tool_call_parser and reasoning_parser, and sampling_defaults.

        Raises:
            ConfigError: the folder has a tokenizer or a template that cannot be used.
        """
        info = engine.info()
        path = info.config.model_path
        self.tokenizer: ChatTokenizer | None = None
        if engine.tokenizer is not None:
            self.tokenizer = ChatTokenizer.load(info.config.tokenizer_path or path, parsers)
        self.model = ModelInfo(
            model_id=path,
            context_length=info.context_length,
            vocab_size=info.vocab_size,
            created=0,
            kv_room=info.max_request_tokens,
            eos_token_ids=info.eos_token_ids,
            sampling=sampling_defaults(path) if defaults == "model" else {},
        )
        self.limits = RequestLimits.of(info.context_length)
        self.grammars = Grammars(self.tokenizer, self.model)
        self._loop = _LoopThread()

    def understood(self, asked: CoreRequest) -> GenerateCall:
        """The sequences of a request and the shape of its answer.

        Raises:
            ApiError: the request cannot be served; the field at fault is named.
        """
        with asked.origins.named():
            return self._loop.run(understand(self, self.limits, asked, 0))

    def close(self) -> None:
        """End the process that compiles grammars, and the thread of this model."""
        self.grammars.close()
        self._loop.close()


class _LoopThread:
    """An event loop in a thread of its own. So asynchronous code also runs where the caller's thread has a loop that
    runs already, as in a notebook, and tasks live on between two calls.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="aerie-offline", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for what `work` returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Cancel what still runs, and end the thread. The garbage collector may call this in any thread."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _stop(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()
