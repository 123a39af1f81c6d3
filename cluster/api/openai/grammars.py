"""Grammars of requests, compiled beside the event loop and beside the engine."""

import asyncio
import logging

from cluster.api.openai.constraints import Constraint, refused
from cluster.api.openai.errors import ApiError
from cluster.api.openai.service import ModelInfo
from cluster.api.openai.tokenizer import ChatTokenizer
from cluster.config import ConfigError
from cluster.grammar.asked import GrammarError
from cluster.grammar.compiler import Compiler, CompilerError
from cluster.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


class Grammars:
    """Compiles what requests ask for, over the tokens of the model that is served."""

    def __init__(self, tokenizer: ChatTokenizer | None, model: ModelInfo) -> None:
        self._tokenizer, self._model = tokenizer, model
        self._compiler: Compiler | None = None

    async def compiled(self, constraint: Constraint) -> str:
        """The compiled grammar of a constraint.

        Raises:
            ApiError: 400 that names the field: the grammar is not honoured, or not over this tokenizer.
        """
        field = constraint.field
        if self._tokenizer is None:
            message = f"{field}: this model is served without a tokenizer, which a grammar needs; leave it out"
            raise ApiError(message, param=field, code="unsupported_parameter")
        try:
            if self._compiler is None:
                self._compiler = await asyncio.to_thread(self._make, self._tokenizer)
            return await self._compiler.compile(constraint.grammar)
        except GrammarError as error:
            raise refused(error, field) from None
        except ConfigError as error:
            raise ApiError(f"{field}: {error}", param=field, code="unsupported_parameter") from None
        except CompilerError as error:
            logger.exception("a grammar cannot be compiled")
            raise ApiError(f"{field}: {error}", status=503, param=field, code="overloaded") from None

    def close(self) -> None:
        """End the processes that compile."""
        if self._compiler is not None:
            self._compiler.close()

    def _make(self, tokenizer: ChatTokenizer) -> Compiler:
        return Compiler(Vocabulary.of(tokenizer.text, self._model.vocab_size, self._model.eos_token_ids))
