"""Answers to chat requests as they come, from a server or from an engine of this process.

Both doors read the same body, that of /v1/chat/completions, with the same code; so they say the same.
"""

import asyncio
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.api.openai.errors import ApiError
from cluster.api.openai.protocol import ChatRequest
from cluster.api.openai.service import Limits, ModelInfo
from cluster.api.openai.tokenizer import ChatTokenizer
from cluster.api.replica.calls import Call, checked, understand
from cluster.config import ConfigError
from cluster.engine.engine import Engine
from cluster.tools.client import Client, NoAnswerError
from cluster.tools.steps import steps
from cluster.tools.terminal import interrupt_held


@dataclass(frozen=True, slots=True)
class Run:
    """What one step gave an answer. The text may lag behind the tokens, as in `cluster.text.StoppedText`."""

    text: str
    tokens: int
    finish_reason: str | None = None


class Answers(Protocol):
    """Who answers."""

    name: str

    def answer(self, body: Mapping[str, Any]) -> Generator[Run, None, None]:
        """The runs of one answer; closing it ends the request.

        Raises:
            ValueError: the request is refused or fails; one line.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        ...


class ServerAnswers:
    """Answers of a server; of a stream, one chunk is what one step gave."""

    def __init__(self, client: Client, model: str | None) -> None:
        """`model` None is the first one that the server has.

        Raises:
            NoAnswerError: the server cannot be reached.
        """
        self._client = client
        served = [card["id"] for card in client.json("/v1/models").get("data", [])]
        if not served:
            raise NoAnswerError(f"{client.url} has no model")
        self._model = served[0] if model is None else model
        self.name = f"{self._model} at {client.url}"

    def answer(self, body: Mapping[str, Any]) -> Generator[Run, None, None]:
        """See `Answers.answer`."""
        asked = {**body, "model": self._model, "stream": True, "return_token_ids": True}
        with closing(self._client.events("/v1/chat/completions", asked)) as events:
            for event in events:
                for choice in event.get("choices", ()):
                    text, ids = choice["delta"].get("content") or "", choice.get("token_ids") or ()
                    if text or ids or choice.get("finish_reason"):
                        yield Run(text, len(ids), choice.get("finish_reason"))


@dataclass(frozen=True, slots=True)
class Folder:
    """A model in this process; see `cluster.api.openai.service.Served`."""

    model: ModelInfo
    tokenizer: ChatTokenizer


class EngineAnswers:
    """Answers of an engine in this process."""

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
        model = ModelInfo(path, info.context_length, info.vocab_size, 0, info.max_request_tokens)
        self._folder = Folder(model, tokenizer)
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
            fields, warnings = checked(self._folder, self._limits, ChatRequest, body)
            return asyncio.run(understand(self._folder, self._limits, fields, warnings, 0))
        except ApiError as error:
            raise ValueError(error.message) from None
