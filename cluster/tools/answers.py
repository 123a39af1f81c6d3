"""Answers to chat requests as they come: what one is, and those of a server."""

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.tools.client import Client, NoAnswerError


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What one step gave an answer. The text may lag behind the tokens, as in `StoppedText`."""

    text: str
    tokens: int
    finish_reason: str | None = None


class Answers(Protocol):
    """Who answers."""

    name: str

    def answer(self, body: Mapping[str, Any]) -> Generator[AnswerPart, None, None]:
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

    def answer(self, body: Mapping[str, Any]) -> Generator[AnswerPart, None, None]:
        """See `Answers.answer`."""
        asked = {**body, "model": self._model, "stream": True, "return_token_ids": True}
        with closing(self._client.events("/v1/chat/completions", asked)) as events:
            for event in events:
                for choice in event.get("choices", ()):
                    text, ids = choice["delta"].get("content") or "", choice.get("token_ids") or ()
                    if text or ids or choice.get("finish_reason"):
                        yield AnswerPart(text, len(ids), choice.get("finish_reason"))
