"""Parsers of the two ways in which model families write calls: JSON after a heading, or marks around each argument."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from json import JSONDecodeError, JSONDecoder
from typing import Any, NoReturn

from cluster.chat.reading import BlockResult, ToolCallText

MARKS = re.compile(r'["\\{}\[\]]')
SPACE = re.compile(r"[ \t\n\r]*")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number in JSON")


DECODER = JSONDecoder(parse_constant=_refuse)


class ValueEnd:
    """Finds the end of an object or list in a growing text; each character is examined once."""

    def __init__(self, start: int) -> None:
        self._at = start
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """Return the index after the value's last bracket, or None if it is missing. `text` may only grow between
        calls.
        """
        while (mark := MARKS.search(text, self._at)) is not None:
            character = mark[0]
            if character == "\\" and self._in_string and mark.end() == len(text):
                break  # the escaped character has not come yet
            self._at = mark.end() + (character == "\\" and self._in_string)
            if character == '"':
                self._in_string = not self._in_string
            elif not self._in_string and character != "\\":
                self._depth += 1 if character in "{[" else -1
                if self._depth <= 0:
                    return self._at
        else:
            self._at = max(self._at, len(text))
        return None


def members(text: str) -> dict[str, str] | None:
    """Return the text of each member of an object, or None if the text is no object. A repeated name has its last
    value.
    """
    found: dict[str, str] = {}
    try:
        at = _after(text, 0, "{")
        if text[at : at + 1] == "}":
            return found if not text[at + 1 :].strip() else None
        while True:
            name, at = _value(text, at)
            if not isinstance(name, str):
                return None
            start = _after(text, _space(text, at), ":")
            _, end = _value(text, start)
            found[name] = text[start:end]
            at = _space(text, end)
            if text[at : at + 1] == "}":
                return found if not text[at + 1 :].strip() else None
            at = _after(text, at, ",")
    except (ValueError, RecursionError):
        return None


def items(text: str) -> list[str] | None:
    """Return the texts of a list's items, or None if the text is not a list or the list is empty."""
    found = []
    try:
        at = _after(text, 0, "[")
        while True:
            _, end = _value(text, at)
            found.append(text[at:end])
            at = _space(text, end)
            if text[at : at + 1] == "]":
                return found if not text[at + 1 :].strip() else None
            at = _after(text, at, ",")
    except (ValueError, RecursionError):
        return None


def loaded(text: str) -> Any:
    """Return the value of a JSON text, or None if the text is invalid. The value of null is also None."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _space(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    return at if found is None else found.end()


def _after(text: str, at: int, expected: str) -> int:
    if text[at : at + 1] != expected:
        raise JSONDecodeError(f"expected {expected}", "", at)
    return _space(text, at + 1)


def _value(text: str, at: int) -> tuple[Any, int]:
    return DECODER.raw_decode(text, at)


DEEPEST = 16
"""Depth of nested references and alternatives after which a schema counts as allowing anything."""
TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def member(text: str, name: str, schema: Mapping[str, Any]) -> str:
    """Return the JSON of the member `name` of an object with this schema, written by the model as `text`.

    If the text is JSON of a type that the schema allows, it is returned unchanged; but a text in quotes becomes a
    string that contains the quotes, if the schema names the type string. Otherwise the text becomes a string, if the
    schema allows strings or the text is not JSON. All other JSON is returned unchanged. True, False and None count as
    true, false and null, because chat templates write arguments so.
    """
    properties = schema.get("properties")
    declared = properties.get(name) if isinstance(properties, Mapping) else None
    kinds = _kinds(schema.get("additionalProperties") if declared is None else declared, schema, DEEPEST)
    written = text.strip()
    value = loaded(written)
    kind = "null" if written == "null" else None if value is None else TYPES[type(value)]
    if kinds is None:
        return json.dumps(text, ensure_ascii=False) if kind is None else written
    if kind in kinds - {"string"} or (kind == "integer" and "number" in kinds):
        return written
    if "boolean" in kinds and written.lower() in ("true", "false"):
        return written.lower()
    if "null" in kinds and written.lower() in ("null", "none"):
        return "null"
    if "string" in kinds or kind is None:
        return json.dumps(text, ensure_ascii=False)
    return written


def _kinds(schema: Any, root: Mapping[str, Any], deepest: int) -> set[str] | None:
    """Return the types that a schema allows, or None if it allows any type."""
    if not isinstance(schema, Mapping) or not deepest:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        return _kinds(_found(reference, root), root, deepest - 1)
    kind, values = schema.get("type"), schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)}
    if isinstance(values, list) and values:
        return {"null" if value is None else TYPES[type(value)] for value in values}
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list) and parts:
            each = [_kinds(part, root, deepest - 1) for part in parts]
            return None if None in each else {one for kinds in each for one in kinds or ()}
    every = schema.get("allOf")
    known = [_kinds(part, root, deepest - 1) for part in every] if isinstance(every, list) else []
    return next((kinds for kinds in known if kinds is not None), None)


def _found(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference inside the schema, or None if the target does not exist."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


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
    (`member`).

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
