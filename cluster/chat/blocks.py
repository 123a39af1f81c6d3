"""The two ways in which families write calls: a heading with JSON after it, or marks around every argument."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.chat.json_text import ValueEnd, items, loaded, members
from cluster.chat.reading import Call, Read

MOST_HEADING = 512  # characters between a trigger and the JSON
Calls = Callable[[str, re.Match[str]], Sequence[Call]]
"""The calls in a JSON text and its heading; none if it is malformed."""


class JsonBlock:
    """A heading, a JSON object or list, and marks that may follow it.

    `heading` matches all that stands before the first brace; where it has a group `list`, the value is a list and
    begins there.
    """

    def __init__(self, heading: re.Pattern[str], calls: Calls, closing: Sequence[str]) -> None:
        self._heading, self._calls, self._closing = heading, calls, closing
        self._match: re.Match[str] | None = None
        self._start = 0
        self._end: ValueEnd | None = None

    def read(self, text: str) -> Read | None:
        """See `Block`."""
        if self._end is None:
            brace = text.find("{", 0, MOST_HEADING)
            if brace < 0:
                return None if len(text) < MOST_HEADING else Read(len(text))
            self._match = self._heading.fullmatch(text[:brace])
            if self._match is None:
                return Read(brace)
            as_list = "list" in self._match.groupdict() and self._match["list"] is not None
            self._start = self._match.start("list") if as_list else brace
            self._end = ValueEnd(self._start)
        end = self._end.find(text)
        if end is None:
            return None
        assert self._match is not None
        return Read(end, self._calls(text[self._start : end], self._match), self._closing)


def named_call(text: str, fields: Sequence[str]) -> list[Call]:
    """The call in an object with a name, and the arguments in one of `fields`; none if it is something else."""
    found = members(text)
    name = loaded(found["name"]) if found is not None and "name" in found else None
    if found is None or not isinstance(name, str) or not name:
        return []
    given = next((found[field] for field in fields if field in found), "{}")
    inner = loaded(given)
    if isinstance(inner, str):  # some write the object as a string
        given = inner
    return [Call(name, given)] if members(given) is not None else []


def named_calls(text: str, fields: Sequence[str]) -> list[Call]:
    """The calls in a list of such objects; none if one of them is something else."""
    calls = [named_call(item, fields) for item in items(text) or ()]
    return [call for one in calls for call in one] if all(calls) else []


def headed_call(text: str, heading: re.Match[str]) -> list[Call]:
    """The call whose name is in its heading; none if the text is no object."""
    return [Call(heading["name"], text)] if members(text) is not None else []


class TaggedBlock:
    """A call whose arguments stand each between marks of its own.

    `whole` matches the call up to `end`, which may also stand inside a value; its groups are `name` and `arguments`.
    `argument` matches one argument, with the groups `key` and `value`; `inner` are the marks around a value. What a
    value is, the tool's schema says: the text itself where it is a string, else JSON.
    """

    def __init__(
        self,
        whole: re.Pattern[str],
        argument: re.Pattern[str],
        end: str,
        inner: tuple[str, str],
        tools: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._whole, self._argument, self._end, self._inner = whole, argument, end, inner
        self._tools = tools
        self._from = 0

    def read(self, text: str) -> Read | None:
        """See `Block`."""
        while (at := text.find(self._end, max(0, self._from))) >= 0:
            self._from = at + 1
            body = text[:at]
            opened, closed = (body.count(mark) for mark in self._inner)
            if opened <= closed:
                return Read(at + len(self._end), self._calls(body))
        self._from = max(self._from, len(text) - len(self._end) + 1)
        return None

    def _calls(self, body: str) -> list[Call]:
        found = self._whole.fullmatch(body)
        if found is None:
            return []
        schema = self._tools.get(found["name"], {})
        given: dict[str, str] = {}
        for argument in self._argument.finditer(found["arguments"]):
            given[argument["key"]] = _json_of(argument["value"], argument["key"], schema)
        inside = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in given.items())
        return [Call(found["name"], "{" + inside + "}")]


def _json_of(text: str, key: str, schema: Mapping[str, Any]) -> str:
    """A value as JSON: itself where it is JSON and the schema wants no string there, else as a string."""
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    if not _is_string(declared):
        value = loaded(text)
        if value is not None or text.strip() == "null":
            return text.strip()
    return json.dumps(text, ensure_ascii=False)


def _is_string(schema: Any) -> bool:
    """Whether a schema allows nothing but strings, as far as it says so itself."""
    if not isinstance(schema, Mapping):
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and "type" not in schema:
        return all(isinstance(value, str) for value in values)
    kind = schema.get("type")
    return kind == "string" or kind == ["string"]
