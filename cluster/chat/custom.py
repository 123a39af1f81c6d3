"""Custom tools take one text as input, not a JSON object.

Chat templates and formats know only functions, whose arguments are a JSON object. So the model sees a custom tool as a
function with one string, `input`, and the text is extracted from the arguments of its calls.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from cluster.chat.blocks import try_parse_json
from cluster.chat.events import CallArguments, CallStarted, Event
from cluster.chat.reading import AnswerReader

INPUT_FIELD = "input"


def input_schema(pattern: str | None = None) -> dict[str, Any]:
    """Return the JSON schema of arguments that hold the text. `pattern` is a regular expression that the whole text
    must match; None allows any text.
    """
    input_type = {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}
    return {
        "type": "object",
        "properties": {INPUT_FIELD: input_type},
        "required": [INPUT_FIELD],
        "additionalProperties": False,
    }


def arguments_json(text: str) -> str:
    """Return the JSON arguments of a call with this text."""
    return json.dumps({INPUT_FIELD: text}, ensure_ascii=False)


def input_text(arguments: str) -> str:
    """Return the text in the arguments of a call: the member `input` or, if there is none, the only member. If this is
    not a string, return `arguments` unchanged; that is possible if no grammar constrains the model.
    """
    arguments_value = try_parse_json(arguments)
    if isinstance(arguments_value, dict):
        input_value = arguments_value.get(
            INPUT_FIELD, next(iter(arguments_value.values())) if len(arguments_value) == 1 else None
        )
        if isinstance(input_value, str):
            return input_value
    return arguments


class CustomReader:
    """An `AnswerReader` that reports calls of custom tools with their text in place of their arguments."""

    def __init__(self, reader: AnswerReader, custom_tool_names: Collection[str]) -> None:
        """`custom_tool_names` are the custom tools. `reader` must report all arguments of a call in one event."""
        self._reader = reader
        self._custom_tool_names = custom_tool_names
        self._custom_calls: set[int] = set()

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self._reader.is_reasoning

    def push(self, text: str) -> list[Event]:
        """Return the events that this text completes."""
        return self._convert(self._reader.push(text))

    def finish(self) -> list[Event]:
        """Return the remaining events, at the end of the answer."""
        return self._convert(self._reader.finish())

    def _convert(self, events: Sequence[Event]) -> list[Event]:
        converted: list[Event] = []
        for event in events:
            if isinstance(event, CallStarted) and event.name in self._custom_tool_names:
                self._custom_calls.add(event.call_index)
                converted.append(replace(event, custom=True))
            elif isinstance(event, CallArguments) and event.call_index in self._custom_calls:
                converted.append(CallArguments(event.call_index, input_text(event.text)))
            else:
                converted.append(event)
        return converted
