"""Streamed answers to chat requests: the interface `Answers`, and its implementation that asks a server."""

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.tools.client import Client, NoAnswerError


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """The text and the number of tokens that a step added to an answer. The text may lag behind the tokens: incomplete
    characters, and text that may become a stop string, are held back until a later step.
    """

    text: str
    tokens: int
    finish_reason: str | None = None


class Answers(Protocol):
    """A source of chat answers: a server, or an engine of this process. `name` is shown to the user."""

    name: str

    def answer(self, body: Mapping[str, Any]) -> Generator[AnswerPart, None, None]:
        """Yield the parts of one answer as they are generated. Closing the generator aborts the request.

        Raises:
            ValueError: the request is refused or fails; the message is one line.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        ...


class ServerAnswers:
    """Answers of a server. Each chunk of the stream carries the output of one step."""

    def __init__(self, client: Client, model: str | None) -> None:
        """`model` is the name of a model. If it is None, the first model that the server lists is used.

        Raises:
            NoAnswerError: the server cannot be reached or lists no model.
        """
        self._client = client
        model_ids = [card["id"] for card in client.json("/v1/models").get("data", [])]
        if not model_ids:
            raise NoAnswerError(f"{client.url} has no model")
        self._model = model_ids[0] if model is None else model
        self.name = f"{self._model} at {client.url}"

    def answer(self, body: Mapping[str, Any]) -> Generator[AnswerPart, None, None]:
        """Yield the parts of the answer from POST /v1/chat/completions with `stream` on."""
        request_body = {**body, "model": self._model, "stream": True, "return_token_ids": True}
        with closing(self._client.events("/v1/chat/completions", request_body)) as events:
            for event in events:
                for choice in event.get("choices", ()):
                    text, ids = choice["delta"].get("content") or "", choice.get("token_ids") or ()
                    if text or ids or choice.get("finish_reason"):
                        yield AnswerPart(text, len(ids), choice.get("finish_reason"))
