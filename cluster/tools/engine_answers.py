"""Chat answers of an engine in this process.

Requests have the body of /v1/chat/completions and are parsed by that route's code, so a server gives the same answer.
"""

import argparse
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

from cluster.api.core.adapter import GenerateCall
from cluster.api.core.errors import ApiError
from cluster.api.openai.answers import read_chat
from cluster.config import ConfigError, EngineConfig
from cluster.engine.build import build_engine
from cluster.engine.engine import Engine
from cluster.offline.interrupts import defer_interrupt
from cluster.offline.local_model import LocalModel
from cluster.offline.stepping import steps
from cluster.tools.answers import AnswerPart
from cluster.tools.engine_flags import engine_settings


class EngineAnswers:
    """The `Answers` of an engine in this process."""

    def __init__(self, engine: Engine) -> None:
        """Read the tokenizer and the chat template from the target's folder.

        Raises:
            ConfigError: the folder has no tokenizer or no chat template.
        """
        info = engine.info()
        path = info.config.model_path
        if engine.tokenizer is None:
            raise ConfigError(f"a chat needs a tokenizer and {path!r} has none; aerie generate takes token ids")
        self._engine, self._model = engine, LocalModel(engine)
        if self._model.tokenizer is None or not self._model.tokenizer.has_template:
            raise ConfigError(
                f"{path!r} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): add "
                "that of the model it is made from, or continue text with aerie generate"
            )
        draft_text = "without a draft" if info.draft is None else f"{info.draft.algorithm} draft"
        self.name = f"{path}, {draft_text}, {info.dtype} on {info.device}"

    def answer(self, body: Mapping[str, Any]) -> Generator[AnswerPart, None, None]:
        """Yield the parts of the answer, one step at a time. Ctrl-C takes effect after the current step."""
        with defer_interrupt() as interrupt:
            [choice] = self._parse(body).choices
            with closing(steps(self._engine, [choice.request])) as step_outputs:
                for outputs in step_outputs:
                    for output in outputs:
                        if output.error is not None:
                            raise ValueError(output.error)
                        delta = choice.process_output(output)
                        yield AnswerPart(delta.text, len(delta.token_ids), delta.finish_reason)
                    if interrupt.pressed and not choice.finished:
                        raise KeyboardInterrupt

    def _parse(self, body: Mapping[str, Any]) -> GenerateCall:
        try:
            return self._model.prepare_call(read_chat(self._model, self._model.limits, body))
        except ApiError as error:
            raise ValueError(error.message) from None


def engine_answers(args: argparse.Namespace) -> EngineAnswers:
    """Build the engine that the flags of `aerie chat` describe, and return its `Answers`.

    Raises:
        ConfigError: a setting cannot be honoured, or the model cannot chat.
    """
    return EngineAnswers(build_engine(EngineConfig.from_kwargs(engine_settings(args, args.dir))))
