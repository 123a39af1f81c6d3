"""Grammars of requests, compiled beside the event loop and beside the engine."""

import asyncio
import logging

from cluster.api.core.constraints import OutputConstraint, refused
from cluster.api.core.errors import RETRY_AFTER_S, ApiError
from cluster.api.core.service import ModelInfo
from cluster.api.core.tokenizer import ChatTokenizer
from cluster.config import ConfigError
from cluster.grammar.asked import GrammarError
from cluster.grammar.compiler import Compiler, CompilerError
from cluster.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


class Grammars:
    """Compiles what requests ask for, over the tokens of the model that is served."""

    def __init__(self, tokenizer: ChatTokenizer | None, model: ModelInfo) -> None:
        self._tokenizer, self._model = tokenizer, model
        self._making: asyncio.Task[Compiler] | None = None
        self._warming: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start what compiles, beside the caller, so that the first request with a grammar does not wait for it.

        Needs a running event loop.
        """
        if self._tokenizer is not None:
            self._made(self._tokenizer)

    async def compiled(self, constraint: OutputConstraint) -> str:
        """The grammar of a constraint as ranks read it: it compiles.

        Raises:
            ApiError: 400 that names the field: the grammar is not honoured, or not over this tokenizer. 503 with
                Retry-After: it cannot be compiled now.
        """
        field = constraint.field
        if self._tokenizer is None:
            message = f"{field}: this model is served without a tokenizer, which a grammar needs; leave it out"
            raise ApiError(message, param=field, code="unsupported_parameter")
        try:
            compiler = await asyncio.shield(self._made(self._tokenizer))
            return await compiler.compile(constraint.grammar)
        except GrammarError as error:
            raise refused(error, field) from None
        except ConfigError as error:
            raise ApiError(f"{field}: {error}", param=field, code="unsupported_parameter") from None
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
        """The compiler, made once: reading a large vocabulary takes tenths of a second."""
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
    """Take note of an error that nobody may ever wait for; who asks for a grammar gets it."""
    if not making.cancelled() and (error := making.exception()) is not None:
        logger.info("no output can be held to a grammar: %s", error)
