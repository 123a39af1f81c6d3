"""Parsers of the two ways in which model families write calls: JSON after a heading, or marks around each argument."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.chat.json_text import ValueEnd, items, loaded, members
from cluster.chat.reading import BlockResult, ToolCallText
from cluster.chat.values import member

MOST_HEADING = 512  # characters between a trigger and the JSON
NO_CALL = BlockResult(1)
"""The result for a trigger (a begin mark) that begins no call. Its first character becomes text; the rest is parsed
again.
"""
Calls = Callable[[str, re.Match[str]], Sequence[ToolCallText]]
"""A function that takes a JSON text and its heading, and returns the calls in them. It returns no call if the text is
malformed.
"""


class JsonBlock:
    """Parses a heading, a JSON object or list, and the marks (`closing`) that may follow the JSON. `heading` matches
    all text before the first brace. If the group `list` of this pattern matched, the JSON is a list that begins at that
    group.
    """

    def __init__(self, heading: re.Pattern[str], calls: Calls, closing: Sequence[str]) -> None:
        self._heading, self._calls, self._closing = heading, calls, closing
        self._match: re.Match[str] | None = None
        self._start = 0
        self._end: ValueEnd | None = None

    def read(self, text: str) -> BlockResult | None:
        """Return the block once it is complete, else None; see `BlockReader.read`."""
        if self._end is None:
            brace = text.find("{", 0, MOST_HEADING)
            if brace < 0:
                return None if len(text) < MOST_HEADING else NO_CALL
            self._match = self._heading.fullmatch(text[:brace])
            if self._match is None:
                return NO_CALL
            as_list = "list" in self._match.groupdict() and self._match["list"] is not None
            self._start = self._match.start("list") if as_list else brace
            self._end = ValueEnd(self._start)
        end = self._end.find(text)
        if end is None:
            return None
        assert self._match is not None
        return BlockResult(end, self._calls(text[self._start : end], self._match), self._closing)


def named_call(text: str, fields: Sequence[str]) -> list[ToolCallText]:
    """Return the call in an object that has a name, and arguments in one of `fields`. Another object is no call."""
    found = members(text)
    name = loaded(found["name"]) if found is not None and "name" in found else None
    if found is None or not isinstance(name, str) or not name:
        return []
    given = next((found[field] for field in fields if field in found), "{}")
    inner = loaded(given)
    if isinstance(inner, str):  # some models write the object as a string
        given = inner
    return [ToolCallText(name, given)] if members(given) is not None else []


def named_calls(text: str, fields: Sequence[str]) -> list[ToolCallText]:
    """Return the calls in a list of objects (see `named_call`), or no call if one of the objects is not a call."""
    calls = [named_call(item, fields) for item in items(text) or ()]
    return [call for one in calls for call in one] if all(calls) else []


def headed_call(text: str, heading: re.Match[str]) -> list[ToolCallText]:
    """Return the call whose name is in the heading, or no call if the text is not an object."""
    return [ToolCallText(heading["name"], text)] if members(text) is not None else []


class TaggedBlock:
    """Parses a call whose arguments are each enclosed in marks.

    `ends` maps each trigger to the mark that ends its block; that mark may also occur inside a value. `whole` matches a
    block up to that mark, with the groups `name` and `arguments`. `argument` matches one argument, with the groups
    `key` and `value`. `inner` are the marks around a value. The tool's schema decides how a value is read
    (`cluster.chat.values`).

    The first trigger of `ends` is the regular one. A block that begins with another trigger lacks the regular one. Such
    a block is a call only if it names a known tool, and the regular end mark may follow it.
    """

    def __init__(
        self,
        whole: re.Pattern[str],
        argument: re.Pattern[str],
        ends: Mapping[str, str],
        inner: tuple[str, str],
        tools: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._whole, self._argument, self._ends, self._inner = whole, argument, ends, inner
        self._tools = tools
        self._from = 0

    def read(self, text: str) -> BlockResult | None:
        """Return the block once it is complete, else None; see `BlockReader.read`."""
        first, *others = self._ends
        trigger = next((one for one in others if text.startswith(one)), first)
        end = self._ends[trigger]
        while (at := text.find(end, self._from)) >= 0:
            self._from = at + 1
            body = text[:at]
            if self._open(body):
                continue
            calls = self._calls(body)
            if trigger != first and not (calls and calls[0].name in self._tools):
                return NO_CALL
            if not calls and self._begins_again(body):
                return NO_CALL
            return BlockResult(at + len(end), calls, () if trigger == first else (self._ends[first],))
        self._from = max(self._from, len(text) - len(end) + 1)
        return None

    def _open(self, body: str) -> bool:
        """Whether the body ends inside a value: the end mark after it belongs to the value. Values may contain begin
        marks.
        """
        begin, end = self._inner
        at = 0
        while (at := body.find(begin, at)) >= 0:
            if (at := body.find(end, at)) < 0:
                return True
        return False

    def _begins_again(self, body: str) -> bool:
        """Whether a trigger occurs again before any value: then the first trigger was only mentioned in text."""
        values = body.find(self._inner[0])
        return any(body.find(trigger, 1, values if values >= 0 else None) >= 0 for trigger in self._ends)

    def _calls(self, body: str) -> list[ToolCallText]:
        found = self._whole.fullmatch(body)
        if found is None:
            return []
        schema = self._tools.get(found["name"], {})
        given: dict[str, str] = {}
        for argument in self._argument.finditer(found["arguments"]):
            given[argument["key"]] = member(argument["value"], argument["key"], schema)
        inside = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in given.items())
        return [ToolCallText(found["name"], "{" + inside + "}")]
