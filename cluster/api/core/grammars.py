"""Compiles the grammars of requests in a separate process, so that neither the event loop nor the engine waits."""

import asyncio
import logging

from cluster.api.core.constraints import OutputConstraint
from cluster.api.core.errors import RETRY_AFTER_S, ApiError, invalid_value, unsupported_parameter
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
        self._compiler_task: asyncio.Task[Compiler] | None = None
        self._warmup_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the compiler in the background, so that the first request with a grammar does not wait for its start.

        This needs a running event loop. If the model has no tokenizer, nothing is started.
        """
        if self._tokenizer is not None:
            self._get_compiler_task(self._tokenizer)

    async def compile(self, constraint: OutputConstraint) -> str:
        """Return the compiled grammar of a constraint, as the text that `RequestParams.grammar` holds.

        Raises:
            ApiError: 400 that names the field if this grammar is refused, or if this model has no tokenizer or one that
                allows no grammar; 503 with Retry-After if the grammar cannot be compiled now.
        """
        field = constraint.field
        if self._tokenizer is None:
            raise unsupported_parameter(
                field, "this model is served without a tokenizer, which a grammar needs; leave it out"
            )
        try:
            # Shielded: several requests wait for this task, so cancelling one of the requests must not cancel the task.
            compiler = await asyncio.shield(self._get_compiler_task(self._tokenizer))
            return await compiler.compile(constraint.grammar)
        except GrammarError as error:
            raise invalid_value(field, str(error)) from None
        except ConfigError as error:
            raise unsupported_parameter(field, str(error)) from None
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
        """End the process that compiles, if it has been started."""
        compiler_task = self._compiler_task
        if (
            compiler_task is not None
            and compiler_task.done()
            and not compiler_task.cancelled()
            and compiler_task.exception() is None
        ):
            compiler_task.result().close()

    def _get_compiler_task(self, tokenizer: ChatTokenizer) -> "asyncio.Task[Compiler]":
        """Return the task that makes the compiler. All calls share it: reading a large vocabulary takes tenths of a
        second.
        """
        if self._compiler_task is None:
            self._compiler_task = asyncio.create_task(self._create_compiler(tokenizer))
            self._compiler_task.add_done_callback(_log_compiler_failure)
        return self._compiler_task

    async def _create_compiler(self, tokenizer: ChatTokenizer) -> Compiler:
        vocab_size, eos_token_ids = self._model.vocab_size, self._model.eos_token_ids
        compiler = Compiler(
            await asyncio.to_thread(Vocabulary.from_tokenizer, tokenizer.text_tokenizer, vocab_size, eos_token_ids)
        )
        self._warmup_task = asyncio.create_task(compiler.warm())
        return compiler


def _log_compiler_failure(compiler_task: "asyncio.Task[Compiler]") -> None:
    """Log the error of a compiler that cannot be made. Requests with a grammar get the same error as their answer."""
    if not compiler_task.cancelled() and (error := compiler_task.exception()) is not None:
        logger.info("grammars cannot be enforced: %s", error)
