"""Answers of an engine in this process.

The body of a request is that of /v1/chat/completions and is read by the code of that route, so both say the same.
"""

import argparse
import asyncio
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from cluster.api.openai.errors import ApiError
from cluster.api.openai.grammars import Grammars
from cluster.api.openai.service import Limits, ModelInfo
from cluster.api.openai.tokenizer import ChatTokenizer
from cluster.api.replica.asking import asked_chat
from cluster.api.replica.calls import Call, understand
from cluster.arch.generation import sampling_defaults
from cluster.config import ConfigError
from cluster.engine.engine import Engine
from cluster.tools.answers import Run
from cluster.tools.local_engine import engine_of, steps
from cluster.tools.terminal import interrupt_held


@dataclass(frozen=True, slots=True)
class Folder:
    """A model in this process; see `cluster.api.openai.service.Served`."""

    model: ModelInfo
    tokenizer: ChatTokenizer
    grammars: Grammars


class EngineAnswers:
    """See `cluster.tools.answers.Answers`."""

    def __init__(self, engine: Engine) -> None:
        """Read the tokenizer and the chat template beside the target.

        Raises:
            ConfigError: there is none.
        """
        info = engine.info()
        path = info.config.model_path
        if engine.tokenizer is None:
            raise ConfigError(f"a chat needs a tokenizer and {path!r} has none; aerie generate takes token ids")
        tokenizer = ChatTokenizer.load(path)
        if not tokenizer.has_template:
            raise ConfigError(
                f"{path!r} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): add "
                "that of the model it is made from, or continue text with aerie generate"
            )
        self._engine = engine
        sizes = info.context_length, info.vocab_size, 0, info.max_request_tokens
        model = ModelInfo(path, *sizes, info.eos_token_ids, sampling_defaults(path))
        self._folder = Folder(model, tokenizer, Grammars(tokenizer, model))
        self._limits = Limits.of(model.context_length)
        drafts = "without a draft" if info.draft is None else f"{info.draft.algorithm} draft"
        self.name = f"{path}, {drafts}, {info.dtype} on {info.device}"

    def answer(self, body: Mapping[str, Any]) -> Generator[Run, None, None]:
        """See `Answers.answer`; a step of the engine is never cut short."""
        with interrupt_held() as held:
            [choice] = self._understood(body).choices
            with closing(steps(self._engine, [choice.request])) as taken:
                for outputs in taken:
                    for output in outputs:
                        if output.error is not None:
                            raise ValueError(output.error)
                        delta = choice.take(output)
                        yield Run(delta.text, len(delta.token_ids), delta.finish_reason)
                    if held.pressed and not choice.finished:
                        raise KeyboardInterrupt

    def _understood(self, body: Mapping[str, Any]) -> Call:
        try:
            asked = asked_chat(self._folder, self._limits, body)
            return asyncio.run(understand(self._folder, self._limits, asked, 0))
        except ApiError as error:
            raise ValueError(error.message) from None


def engine_answers(args: argparse.Namespace) -> EngineAnswers:
    """Answers of the engine that the flags of `aerie chat` ask for.

    Raises:
        ConfigError: a setting cannot be honoured, or the model cannot chat.
    """
    return EngineAnswers(engine_of(args, args.dir))
