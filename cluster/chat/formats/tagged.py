"""The grammar of arguments that are each enclosed in marks, with strings written without quotes."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cluster.chat.formats.plan import GrammarForm, any_of, const_text, json_value, sequence
from cluster.grammar.asked import GrammarError

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
OBJECT_KEYWORDS = ANNOTATIONS | {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
    "$schema",
    "$id",
}
LENGTH_KEYWORDS = frozenset({"minLength", "maxLength"})
NAME_PLACEHOLDER = "\0"
"""Placeholder for the argument's name in a mark."""
NOT_IN_NAMES = r"<>\n"
"""Characters that no name contains."""
LOCAL_REFERENCE_PREFIXES = ("#/$defs/", "#/definitions/")


def tagged_arguments(value_marks: Callable[[str], tuple[str, str]]) -> Callable[[Mapping[str, Any]], GrammarForm]:
    """Return a function that takes the schema of an object and returns the grammar of the object's members.
    `value_marks` takes the name of a member and returns the texts before and after the member's value.

    Members that the schema does not declare come last. They are allowed if `additionalProperties` allows them, or if
    the schema has neither `additionalProperties` nor `properties`.
    """

    def member(name: GrammarForm, marks: tuple[str, str], schema: Any, root: Mapping[str, Any]) -> GrammarForm:
        (begin, _, begin_rest), end_text = marks[0].partition(NAME_PLACEHOLDER), marks[1]
        return sequence(
            const_text(begin),
            name,
            const_text(begin_rest),
            _value(schema, root, end_text.strip()),
            const_text(end_text),
        )

    def members_form(schema: Mapping[str, Any]) -> GrammarForm:
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        if not isinstance(properties, Mapping):
            raise GrammarError("properties must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise GrammarError("required must be a list of names")
        if missing := [name for name in required if name not in properties]:
            raise GrammarError(f"{missing[0][:60]!r} is required and not among the properties")
        if unsupported := schema.keys() - OBJECT_KEYWORDS:
            raise GrammarError(f"{min(unsupported)} is not enforced in this model's format of calls; leave it out")
        members = []
        for name, member_schema in properties.items():
            if set(name) & set("<>\n"):
                raise GrammarError(f"the property {name[:60]!r} cannot be written in this model's format of calls")
            member_form = member(const_text(name), value_marks(NAME_PLACEHOLDER), member_schema, schema)
            members.append(member_form if name in required else {"type": "optional", "content": member_form})
        extra_schema = schema.get("additionalProperties", "properties" not in schema)
        if extra_schema is not False:
            name = {"type": "regex", "pattern": _other_name_pattern(["", *properties])}
            members.append(
                {"type": "star", "content": member(name, value_marks(NAME_PLACEHOLDER), extra_schema, schema)}
            )
        return sequence(const_text(""), *members)

    return members_form


def _value(schema: Any, root: Mapping[str, Any], end_mark: str) -> GrammarForm:
    """Return the grammar of an argument's value. A string is text without quotes that ends before `end_mark`; values of
    other types are JSON. If the schema is true or {}, the value is any text up to `end_mark`. `root` is the schema that
    contains this one; its `$defs` and `definitions` are copied.
    """
    if schema is True or schema == {}:
        return {"type": "any_text", "excludes": [end_mark]}
    if isinstance(schema, Mapping):
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            return any_of([const_text(value) for value in values])
        if schema.get("type") in ("string", ["string"]):
            return _string(schema, end_mark)
        root_schema = {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **schema}
        for reference in _references(root_schema):
            # The value's schema becomes a root schema of its own, which has only the definitions of the old root. Other
            # references would lead elsewhere there.
            if not reference.startswith(LOCAL_REFERENCE_PREFIXES):
                raise GrammarError(f"$ref to {reference[:60]!r} is not enforced in this model's format of calls")
        return json_value(root_schema)
    return json_value(schema)


def _string(schema: Mapping[str, Any], end_mark: str) -> GrammarForm:
    unsupported = schema.keys() - ANNOTATIONS - LENGTH_KEYWORDS - {"type"}
    if unsupported:
        raise GrammarError(
            f"{min(unsupported)} of a string is not enforced in this model's format of calls; leave it out"
        )
    if not LENGTH_KEYWORDS & schema.keys():
        return {"type": "any_text", "excludes": [end_mark]}
    min_length, max_length, first_char = schema.get("minLength", 0), schema.get("maxLength"), re.escape(end_mark[0])
    if max_length is not None:
        return {"type": "regex", "pattern": f"[^{first_char}]{{{min_length},{max_length}}}"}
    first_chars = {
        "type": "regex",
        "pattern": f"(?:[^{first_char}]|{first_char}[^{re.escape(end_mark[1])}]){{{min_length}}}",
    }
    return sequence(first_chars, {"type": "any_text", "excludes": [end_mark]})


def _references(schema: Any) -> Iterator[str]:
    """Yield all references in a schema."""
    if isinstance(schema, Mapping):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        for subschema in schema.values():
            yield from _references(subschema)
    elif isinstance(schema, list):
        for subschema in schema:
            yield from _references(subschema)


def _other_name_pattern(names: Sequence[str]) -> str:
    """Return a regular expression that matches every name except `names`. Recursive calls get the rests of those names
    that share their first character.
    """
    first_chars = sorted({name[0] for name in names if name})
    other_start = f"[^{NOT_IN_NAMES}{''.join(map(re.escape, first_chars))}][^{NOT_IN_NAMES}]*"
    same_starts = [
        re.escape(first_char) + _other_name_pattern([name[1:] for name in names if name[:1] == first_char])
        for first_char in first_chars
    ]
    return f"(?:{'|'.join([other_start, *same_starts])}){'' if '' in names else '?'}"
