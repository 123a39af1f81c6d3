"""Custom tools take one text as input, not a JSON object.

Chat templates and formats know only functions, whose arguments are a JSON object. So the model sees a custom tool as a
function with one string, `input`, and the text is extracted from the arguments of its calls.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from cluster.chat.blocks import loaded
from cluster.chat.events import CallArguments, CallBegun, Event
from cluster.chat.reading import AnswerReader

FIELD = "input"


def schema_of_input(pattern: str | None = None) -> dict[str, Any]:
    """Return the JSON schema of arguments that hold the text. `pattern` is a regular expression for the whole text."""
    text = {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}
    return {"type": "object", "properties": {FIELD: text}, "required": [FIELD], "additionalProperties": False}


def arguments_of(text: str) -> str:
    """Return the JSON arguments of a call with this text."""
    return json.dumps({FIELD: text}, ensure_ascii=False)


def text_of(arguments: str) -> str:
    """Return the text in the arguments of a call: the string `input`, or the only member if that is a string. Any other
    arguments are returned unchanged; they are possible if no grammar constrains the model.
    """
    found = loaded(arguments)
    if isinstance(found, dict):
        given = found.get(FIELD, next(iter(found.values())) if len(found) == 1 else None)
        if isinstance(given, str):
            return given
    return arguments


class CustomReader:
    """An `AnswerReader` that reports calls of custom tools with their text in place of their arguments."""

    def __init__(self, reader: AnswerReader, names: Collection[str]) -> None:
        """`names` are the custom tools. `reader` must report all arguments of a call in one event."""
        self._reader = reader
        self._names = names
        self._called: set[int] = set()

    @property
    def thinks(self) -> bool:
        """Whether the next text is reasoning."""
        return self._reader.thinks

    def push(self, text: str) -> list[Event]:
        """Return the events that this text completes."""
        return self._told(self._reader.push(text))

    def finish(self) -> list[Event]:
        """Return the remaining events, at the end of the answer."""
        return self._told(self._reader.finish())

    def _told(self, events: Sequence[Event]) -> list[Event]:
        told: list[Event] = []
        for event in events:
            if isinstance(event, CallBegun) and event.name in self._names:
                self._called.add(event.call)
                told.append(replace(event, custom=True))
            elif isinstance(event, CallArguments) and event.call in self._called:
                told.append(CallArguments(event.call, text_of(event.text)))
            else:
                told.append(event)
        return told
