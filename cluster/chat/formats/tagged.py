"""The grammar of arguments that are each enclosed in marks, with strings written without quotes."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cluster.chat.formats.plan import Form, json_value, one_after_another, one_of, text
from cluster.grammar.asked import GrammarError

NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
OF_OBJECT = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
LENGTHS = frozenset({"minLength", "maxLength"})
NAME = "\0"
"""Placeholder for the argument's name in a mark."""
IN_NAMES = r"<>\n"
"""Characters that no name contains."""
INSIDE = ("#/$defs/", "#/definitions/")


def tagged_arguments(mark: Callable[[str], tuple[str, str]]) -> Callable[[Mapping[str, Any]], Form]:
    """Return a function from the schema of an object to the grammar of its members. `mark` returns the text before and
    after the value of the member with a given name.

    Members that the schema does not declare come last. They are allowed if `additionalProperties` allows them, or if
    the schema has neither `additionalProperties` nor `properties`.
    """

    def member(name: Form, marks: tuple[str, str], schema: Any, root: Mapping[str, Any]) -> Form:
        (begin, _, rest), after = marks[0].partition(NAME), marks[1]
        return one_after_another(text(begin), name, text(rest), _value(schema, root, after.strip()), text(after))

    def form(schema: Mapping[str, Any]) -> Form:
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        if not isinstance(properties, Mapping):
            raise GrammarError("properties must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise GrammarError("required must be a list of names")
        if missing := [name for name in required if name not in properties]:
            raise GrammarError(f"{missing[0][:60]!r} is required and not among the properties")
        if unknown := schema.keys() - OF_OBJECT:
            raise GrammarError(f"{min(unknown)} is not enforced in this model's format of calls; leave it out")
        parts = []
        for name, inner in properties.items():
            if set(name) & set("<>\n"):
                raise GrammarError(f"the property {name[:60]!r} cannot be written in this model's format of calls")
            part = member(text(name), mark(NAME), inner, schema)
            parts.append(part if name in required else {"type": "optional", "content": part})
        others = schema.get("additionalProperties", "properties" not in schema)
        if others is not False:
            name = {"type": "regex", "pattern": _unlike(["", *properties])}
            parts.append({"type": "star", "content": member(name, mark(NAME), others, schema)})
        return one_after_another(text(""), *parts)

    return form


def _value(schema: Any, root: Mapping[str, Any], end: str) -> Form:
    """Return the grammar of a value. A string is written without quotes up to the mark `end`; other types are JSON. If
    the schema allows anything, the value is any text up to `end`.
    """
    if schema is True or schema == {}:
        return {"type": "any_text", "excludes": [end]}
    if isinstance(schema, Mapping):
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            return one_of([text(value) for value in values])
        if schema.get("type") in ("string", ["string"]):
            return _string(schema, end)
        whole = {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **schema}
        for reference in _references(whole):
            # the value's schema becomes a root schema, in which other references would lead elsewhere
            if not reference.startswith(INSIDE):
                raise GrammarError(f"$ref to {reference[:60]!r} is not enforced in this model's format of calls")
        return json_value(whole)
    return json_value(schema)


def _string(schema: Mapping[str, Any], end: str) -> Form:
    unknown = schema.keys() - NOTES - LENGTHS - {"type"}
    if unknown:
        raise GrammarError(f"{min(unknown)} of a string is not enforced in this model's format of calls; leave it out")
    if not LENGTHS & schema.keys():
        return {"type": "any_text", "excludes": [end]}
    least, most, first = schema.get("minLength", 0), schema.get("maxLength"), re.escape(end[0])
    if most is not None:
        return {"type": "regex", "pattern": f"[^{first}]{{{least},{most}}}"}
    begun = {"type": "regex", "pattern": f"(?:[^{first}]|{first}[^{re.escape(end[1])}]){{{least}}}"}
    return one_after_another(begun, {"type": "any_text", "excludes": [end]})


def _references(schema: Any) -> Iterator[str]:
    """Yield all references in a schema."""
    if isinstance(schema, Mapping):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        for inner in schema.values():
            yield from _references(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _references(inner)


def _unlike(taken: Sequence[str]) -> str:
    """Return an expression for the rest of a name that differs from all of `taken`."""
    firsts = sorted({name[0] for name in taken if name})
    other = f"[^{IN_NAMES}{''.join(map(re.escape, firsts))}][^{IN_NAMES}]*"
    rests = [re.escape(first) + _unlike([name[1:] for name in taken if name[:1] == first]) for first in firsts]
    return f"(?:{'|'.join([other, *rests])}){'' if '' in taken else '?'}"
