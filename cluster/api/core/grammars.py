"""Compiles the grammars of requests, in a separate process, away from the event loop and the engine."""

import asyncio
import logging

from cluster.api.core.constraints import OutputConstraint
from cluster.api.core.errors import RETRY_AFTER_S, ApiError, unsupported, wrong
from cluster.api.core.limits import ModelInfo
from cluster.api.core.tokenizer import ChatTokenizer
from cluster.config import ConfigError
from cluster.grammar.asked import GrammarError
from cluster.grammar.compiler import Compiler, CompilerError
from cluster.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


class Grammars:
    """Compiles grammars for the vocabulary of the served model."""

    def __init__(self, tokenizer: ChatTokenizer | None, model: ModelInfo) -> None:
        self._tokenizer, self._model = tokenizer, model
        self._making: asyncio.Task[Compiler] | None = None
        self._warming: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the compiler in the background, so that the first request with a grammar does not wait for it.

        Needs a running event loop.
        """
        if self._tokenizer is not None:
            self._made(self._tokenizer)

    async def compiled(self, constraint: OutputConstraint) -> str:
        """Return the compiled grammar of a constraint, as the ranks read it.

        Raises:
            ApiError: 400 that names the field if this grammar, or any grammar with this tokenizer, is not supported;
                503 with Retry-After if the grammar cannot be compiled now.
        """
        field = constraint.field
        if self._tokenizer is None:
            raise unsupported(field, "this model is served without a tokenizer, which a grammar needs; leave it out")
        try:
            # Shielded: several requests wait for this task, so cancelling one of the requests must not cancel the task.
            compiler = await asyncio.shield(self._made(self._tokenizer))
            return await compiler.compile(constraint.grammar)
        except GrammarError as error:
            raise wrong(field, str(error)) from None
        except ConfigError as error:
            raise unsupported(field, str(error)) from None
        except CompilerError as error:
            logger.exception("a grammar cannot be compiled")
            raise ApiError(
                f"{field}: {error}",
                status=503,
                param=field,
                code="overloaded",
                kind="overloaded_error",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            ) from None

    def close(self) -> None:
        """End the process that compiles."""
        making = self._making
        if making is not None and making.done() and not making.cancelled() and making.exception() is None:
            making.result().close()

    def _made(self, tokenizer: ChatTokenizer) -> "asyncio.Task[Compiler]":
        """Return the task that makes the compiler. All calls share it: reading a large vocabulary takes tenths of a
        second.
        """
        if self._making is None:
            self._making = asyncio.create_task(self._make(tokenizer))
            self._making.add_done_callback(_looked_at)
        return self._making

    async def _make(self, tokenizer: ChatTokenizer) -> Compiler:
        size, ends = self._model.vocab_size, self._model.eos_token_ids
        compiler = Compiler(await asyncio.to_thread(Vocabulary.of, tokenizer.text, size, ends))
        self._warming = asyncio.create_task(compiler.warm())
        return compiler


def _looked_at(making: "asyncio.Task[Compiler]") -> None:
    """Log the error of a compiler that cannot be made. Requests with a grammar get the same error as their answer."""
    if not making.cancelled() and (error := making.exception()) is not None:
        logger.info("no output can be held to a grammar: %s", error)
