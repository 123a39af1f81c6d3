"""Parsers of the two ways in which model families write calls: JSON after a heading, or marks around each argument."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from json import JSONDecodeError, JSONDecoder
from typing import Any, NoReturn

from cluster.chat.reading import BlockResult, ToolCallText

STRUCTURAL_CHARS = re.compile(r'["\\{}\[\]]')
WHITESPACE = re.compile(r"[ \t\n\r]*")


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number in JSON")


DECODER = JSONDecoder(parse_constant=_reject_constant)


class ValueEndFinder:
    """Finds the end of the JSON object or list that begins at index `start` of a growing text. Each character is
    examined once.
    """

    def __init__(self, start: int) -> None:
        self._position = start
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """Return the index after the value's last bracket, or None if the bracket has not come yet. From one call of
        this method to the next, `text` may only grow.
        """
        while (match := STRUCTURAL_CHARS.search(text, self._position)) is not None:
            character = match[0]
            if character == "\\" and self._in_string and match.end() == len(text):
                break  # the escaped character has not come yet
            self._position = match.end() + (character == "\\" and self._in_string)
            if character == '"':
                self._in_string = not self._in_string
            elif not self._in_string and character != "\\":
                self._depth += 1 if character in "{[" else -1
                if self._depth <= 0:
                    return self._position
        else:
            self._position = max(self._position, len(text))
        return None


def object_members(text: str) -> dict[str, str] | None:
    """Return the JSON text of each member's value, by the member's name, or None if `text` is not an object in JSON. If
    a name occurs several times, its last value counts.
    """
    result: dict[str, str] = {}
    try:
        position = _expect(text, 0, "{")
        if text[position : position + 1] == "}":
            return result if not text[position + 1 :].strip() else None
        while True:
            name, position = _decode_value(text, position)
            if not isinstance(name, str):
                return None
            start = _expect(text, _skip_space(text, position), ":")
            _, end = _decode_value(text, start)
            result[name] = text[start:end]
            position = _skip_space(text, end)
            if text[position : position + 1] == "}":
                return result if not text[position + 1 :].strip() else None
            position = _expect(text, position, ",")
    except (ValueError, RecursionError):
        return None


def list_items(text: str) -> list[str] | None:
    """Return the JSON texts of a list's items, or None if `text` is not a list in JSON or the list is empty."""
    result = []
    try:
        start = _expect(text, 0, "[")
        while True:
            _, end = _decode_value(text, start)
            result.append(text[start:end])
            start = _skip_space(text, end)
            if text[start : start + 1] == "]":
                return result if not text[start + 1 :].strip() else None
            start = _expect(text, start, ",")
    except (ValueError, RecursionError):
        return None


def try_parse_json(text: str) -> Any:
    """Return the value of a JSON text, or None if the text is invalid. The value of null is also None."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return None


def _skip_space(text: str, position: int) -> int:
    match = WHITESPACE.match(text, position)
    return position if match is None else match.end()


def _expect(text: str, position: int, expected: str) -> int:
    if text[position : position + 1] != expected:
        raise JSONDecodeError(f"expected {expected}", "", position)
    return _skip_space(text, position + 1)


def _decode_value(text: str, position: int) -> tuple[Any, int]:
    return DECODER.raw_decode(text, position)


MAX_SCHEMA_DEPTH = 16
"""A schema that is nested deeper than this in references and alternatives counts as allowing any type."""
JSON_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def encode_member(text: str, name: str, schema: Mapping[str, Any]) -> str:
    """Return the JSON of a member's value, which the model wrote as `text`. `schema` is the schema of the object that
    has the member `name`.

    JSON of a type that the schema allows is returned without the white space around it. If the schema names the type
    string, a text in quotes becomes a string that contains the quotes. Any other text becomes a string if the schema
    allows strings or the text is not JSON; otherwise it is returned as JSON. If the schema names the type boolean or
    null, True, False and None count as true, false and null, because chat templates write arguments so.
    """
    properties = schema.get("properties")
    member_schema = properties.get(name) if isinstance(properties, Mapping) else None
    allowed_types = _allowed_types(
        schema.get("additionalProperties") if member_schema is None else member_schema, schema, MAX_SCHEMA_DEPTH
    )
    stripped = text.strip()
    value = try_parse_json(stripped)
    value_type = "null" if stripped == "null" else None if value is None else JSON_TYPES[type(value)]
    if allowed_types is None:
        return json.dumps(text, ensure_ascii=False) if value_type is None else stripped
    if value_type in allowed_types - {"string"} or (value_type == "integer" and "number" in allowed_types):
        return stripped
    if "boolean" in allowed_types and stripped.lower() in ("true", "false"):
        return stripped.lower()
    if "null" in allowed_types and stripped.lower() in ("null", "none"):
        return "null"
    if "string" in allowed_types or value_type is None:
        return json.dumps(text, ensure_ascii=False)
    return stripped


def _allowed_types(schema: Any, root: Mapping[str, Any], depth_left: int) -> set[str] | None:
    """Return the types that a schema allows, or None if it allows any type."""
    if not isinstance(schema, Mapping) or not depth_left:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        return _allowed_types(_resolve_reference(reference, root), root, depth_left - 1)
    type_names, values = schema.get("type"), schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(type_names, str):
        return {type_names}
    if isinstance(type_names, list):
        return {allowed for allowed in type_names if isinstance(allowed, str)}
    if isinstance(values, list) and values:
        return {"null" if value is None else JSON_TYPES[type(value)] for value in values}
    for name in ("anyOf", "oneOf"):
        if isinstance(subschemas := schema.get(name), list) and subschemas:
            allowed = [_allowed_types(subschema, root, depth_left - 1) for subschema in subschemas]
            return None if None in allowed else {type_name for types in allowed for type_name in types or ()}
    all_of = schema.get("allOf")
    branches = (
        [_allowed_types(subschema, root, depth_left - 1) for subschema in all_of] if isinstance(all_of, list) else []
    )
    return next((types for types in branches if types is not None), None)


def _resolve_reference(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference inside the schema, or None if the target does not exist."""
    target: Any = root
    for segment in reference.removeprefix("#").split("/")[1:]:
        name = segment.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    return target


MAX_HEADING_LENGTH = 512  # characters between a trigger and the JSON
NO_CALL = BlockResult(1)
"""The result for a trigger (a begin mark) that begins no call. Its first character becomes text; the rest is parsed
again.
"""
ParseCalls = Callable[[str, re.Match[str]], Sequence[ToolCallText]]
"""A function that takes a JSON text and its heading, and returns the calls in them. It returns no call if the text is
malformed.
"""


class JsonBlockReader:
    """Parses a block of calls: a heading, then a JSON object or list. `heading` is a pattern that must match all text
    before the first brace. If the group `list` of this pattern matched, the JSON is a list that begins at that group.
    The `closing_marks` may follow the JSON.
    """

    def __init__(self, heading: re.Pattern[str], parse_calls: ParseCalls, closing_marks: Sequence[str]) -> None:
        self._heading, self._parse_calls, self._closing_marks = heading, parse_calls, closing_marks
        self._heading_match: re.Match[str] | None = None
        self._start = 0
        self._end_finder: ValueEndFinder | None = None

    def parse(self, text: str) -> BlockResult | None:
        """Return the block once it is complete, else None; see `BlockReader.parse`."""
        if self._end_finder is None:
            brace = text.find("{", 0, MAX_HEADING_LENGTH)
            if brace < 0:
                return None if len(text) < MAX_HEADING_LENGTH else NO_CALL
            self._heading_match = self._heading.fullmatch(text[:brace])
            if self._heading_match is None:
                return NO_CALL
            is_list = "list" in self._heading_match.groupdict() and self._heading_match["list"] is not None
            self._start = self._heading_match.start("list") if is_list else brace
            self._end_finder = ValueEndFinder(self._start)
        end = self._end_finder.find(text)
        if end is None:
            return None
        assert self._heading_match is not None
        return BlockResult(end, self._parse_calls(text[self._start : end], self._heading_match), self._closing_marks)


def calls_of_object(text: str, fields: Sequence[str]) -> list[ToolCallText]:
    """Return the call in a JSON object, or an empty list if the object is not a call. A call has the member `name`. Its
    arguments are in the first of `fields` that the object has; without such a member they are `{}`.
    """
    members = object_members(text)
    name = try_parse_json(members["name"]) if members is not None and "name" in members else None
    if members is None or not isinstance(name, str) or not name:
        return []
    arguments = next((members[field] for field in fields if field in members), "{}")
    decoded = try_parse_json(arguments)
    if isinstance(decoded, str):  # some models write the object as a string
        arguments = decoded
    return [ToolCallText(name, arguments)] if object_members(arguments) is not None else []


def calls_of_list(text: str, fields: Sequence[str]) -> list[ToolCallText]:
    """Return the calls in a list of objects (see `calls_of_object`), or no call if one of the objects is not a call."""
    calls = [calls_of_object(item, fields) for item in list_items(text) or ()]
    return [call for item_calls in calls for call in item_calls] if all(calls) else []


def calls_of_heading(text: str, heading: re.Match[str]) -> list[ToolCallText]:
    """Return the call whose name is in the heading and whose arguments are `text`; no call if `text` is no object."""
    return [ToolCallText(heading["name"], text)] if object_members(text) is not None else []


class TaggedBlockReader:
    """Parses a call whose arguments are each enclosed in marks.

    `end_marks` maps each trigger to the mark that ends its block; that mark may also occur inside a value.
    `call_pattern` matches a block up to that mark, with the groups `name` and `arguments`. `argument_pattern` matches
    one argument, with the groups `key` and `value`. `value_marks` are the marks before and after a value. The tool's
    schema decides how a value is read (`encode_member`).

    The first trigger of `end_marks` is the regular one. A block that begins with another trigger lacks the regular one.
    Such a block is a call only if it names a known tool, and the regular end mark may follow it.
    """

    def __init__(
        self,
        call_pattern: re.Pattern[str],
        argument_pattern: re.Pattern[str],
        end_marks: Mapping[str, str],
        value_marks: tuple[str, str],
        tools: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._call_pattern, self._argument_pattern, self._end_marks, self._value_marks = (
            call_pattern,
            argument_pattern,
            end_marks,
            value_marks,
        )
        self._tools = tools
        self._search_start = 0

    def parse(self, text: str) -> BlockResult | None:
        """Return the block once it is complete, else None; see `BlockReader.parse`."""
        regular_trigger, *other_triggers = self._end_marks
        trigger = next((other for other in other_triggers if text.startswith(other)), regular_trigger)
        end_mark = self._end_marks[trigger]
        while (position := text.find(end_mark, self._search_start)) >= 0:
            self._search_start = position + 1
            body = text[:position]
            if self._ends_inside_value(body):
                continue
            calls = self._parse_calls(body)
            if trigger != regular_trigger and not (calls and calls[0].name in self._tools):
                return NO_CALL
            if not calls and self._has_second_trigger(body):
                return NO_CALL
            return BlockResult(
                position + len(end_mark),
                calls,
                () if trigger == regular_trigger else (self._end_marks[regular_trigger],),
            )
        self._search_start = max(self._search_start, len(text) - len(end_mark) + 1)
        return None

    def _ends_inside_value(self, body: str) -> bool:
        """Return whether the body ends inside a value. If so, the end mark after the body is part of that value. Begin
        marks inside a value are part of the value too.
        """
        begin, end = self._value_marks
        position = 0
        while (position := body.find(begin, position)) >= 0:
            if (position := body.find(end, position)) < 0:
                return True
        return False

    def _has_second_trigger(self, body: str) -> bool:
        """Return whether a trigger occurs again before the first value. If so, the first trigger is only text that
        mentions the mark.
        """
        first_value = body.find(self._value_marks[0])
        return any(body.find(trigger, 1, first_value if first_value >= 0 else None) >= 0 for trigger in self._end_marks)

    def _parse_calls(self, body: str) -> list[ToolCallText]:
        match = self._call_pattern.fullmatch(body)
        if match is None:
            return []
        schema = self._tools.get(match["name"], {})
        arguments: dict[str, str] = {}
        for argument in self._argument_pattern.finditer(match["arguments"]):
            arguments[argument["key"]] = encode_member(argument["value"], argument["key"], schema)
        members_json = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
        return [ToolCallText(match["name"], "{" + members_json + "}")]
