"""The keywords of JSON Schema, and functions on plain schemas. A plain schema has types and constraints on values of
these types, but no references and no combinations such as anyOf.
"""

import math
from decimal import Decimal
from typing import Any

from cluster.grammar.asked import GrammarError

Schema = dict[str, Any]

STRING = frozenset({"minLength", "maxLength", "pattern", "format", "contentEncoding"})
NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
ARRAY = frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"})
OBJECT = frozenset(
    {
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
    }
)
BY_TYPE = {"string": STRING, "number": NUMBER, "integer": NUMBER, "array": ARRAY, "object": OBJECT}
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
COMBINED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"})
# evaluated last: they apply to properties and items that no other part of the schema describes
LATE = ("unevaluatedProperties", "unevaluatedItems")
EXCLUDED = "not in"  # not a JSON Schema keyword: in a plain schema, the values that `not` excludes
CONSTRAINTS = STRING | NUMBER | ARRAY | OBJECT | COMBINED | {"type", "enum", "const"}
# Annotations: they restrict nothing.
ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
        "$anchor",
        "$dynamicAnchor",
        "$defs",
        "definitions",
        "discriminator",
        "externalDocs",
        "xml",
        "markdownDescription",
        "enumNames",
        "enumDescriptions",
        "propertyOrdering",
    }
)
OWN = ("x-", "qt-")  # prefixes of OpenAPI's extensions and of quicktype's notes about its samples
OFF = {"uniqueItems": False, "nullable": False}  # with these values the keywords restrict nothing
MAX_SIZE = 100_000


class EmptyError(GrammarError):
    """No value satisfies a schema."""


def finite(schema: Schema) -> list[Any] | None:
    """Return the values of const and enum that a plain schema's type allows. Return None if the schema has neither
    keyword.
    """
    named = [[schema["const"]]] if "const" in schema else []
    if "enum" in schema:
        if not isinstance(schema["enum"], list) or not schema["enum"]:
            raise GrammarError("enum must be a list of values, and not an empty one")
        named.append(schema["enum"])
    if not named:
        return None
    allowed = types_of(schema)
    excluded = set(map(spelled, schema.get(EXCLUDED, ())))
    found = {spelled(value): value for value in named[0] if allowed & types_of_value(value)}
    found = {text: value for text, value in found.items() if text not in excluded}
    for values in named[1:]:
        found = {text: found[text] for text in map(spelled, values) if text in found}
    return list(found.values())


def spelled(value: Any) -> str:
    """Return a spelling that only equal values share. 1 and 1.0 have the same spelling; true and 1 do not."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name!r}:{spelled(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spelled, value)) + "]"
    if isinstance(value, Decimal) and value == math.floor(value) and abs(value.adjusted()) < 400:
        return repr(int(value))
    return f"{value:f}".rstrip("0") if isinstance(value, Decimal) else repr(value)


def types_of(schema: Schema) -> set[str]:
    """Return the types that a plain schema allows. Without the keyword `type`, the types follow from keywords that
    apply to one type.
    """
    named = schema.get("type")
    if named is None:
        meant = {kind for kind, keywords in BY_TYPE.items() if keywords & schema.keys()} - {"integer"}
        if len(meant) > 1:
            raise GrammarError(f"say which type is meant: there are keywords of {' and '.join(sorted(meant))}")
        return meant or set(TYPES)
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name in TYPES for name in names):
        raise GrammarError(f"type must be one or several of {', '.join(TYPES)}")
    return set(names)


def types_of_value(value: Any) -> set[str]:
    """Return the types that a value has. A whole number has the types integer and number."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | Decimal):
        return {"number", "integer"} if value == math.floor(value) else {"number"}
    return {"object" if isinstance(value, dict) else "array" if isinstance(value, list) else _plain_type(value)}


def _plain_type(value: Any) -> str:
    return "string" if isinstance(value, str) else "null"


def kinds_of(schema: Schema) -> set[str]:
    """Return the types of a schema's values, with integer counted as number, so that no two types share a value."""
    values = finite(schema)
    types = types_of(schema) if values is None else {kind for value in values for kind in types_of_value(value)}
    return {"number" if name == "integer" else name for name in types}


def size(schema: Schema, name: str) -> int | None:
    """Return the value of a keyword that counts something, such as `minItems`, or None if the keyword is absent."""
    value = schema.get(name)
    if isinstance(value, Decimal) and value == math.floor(value) and value.adjusted() < 10:
        value = int(value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE):
        return value
    raise GrammarError(f"{name} must be an integer from 0 to {MAX_SIZE}")


def is_closed(schema: Schema) -> bool:
    """Whether objects have only the declared properties."""
    extra = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    declares = bool(schema.keys() & {"properties", "patternProperties", "propertyNames"})
    return "patternProperties" not in schema and (extra is False or (extra is None and declares))


def is_never(schema: Any) -> bool:
    """Whether a schema is false, or `{"not": {}}` or `{"not": true}`, which generators write for false."""
    return schema is False or (isinstance(schema, dict) and schema.get("not") in ({}, True) and "not" in schema)


def modern(schema: Schema, path: str) -> Schema:
    """Convert a schema of an older draft or OpenAPI 3.0 to 2020-12: `items`, `nullable`, Boolean exclusive bounds."""
    found = dict(schema)
    if isinstance(found.get("items"), list):
        if "prefixItems" in found:
            raise GrammarError(f"{path}: prefixItems must be a list of schemas, and items one schema")
        found["prefixItems"] = found.pop("items")
        if "additionalItems" in found:
            found["items"] = found["additionalItems"]
    found.pop("additionalItems", None)  # if `items` is not a list, this keyword has no effect
    if found.get("nullable") is True and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
        del found["nullable"]
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive):
            if bound not in found:
                raise GrammarError(f"{path}: {exclusive} is true without {bound}; write the bound as its value")
            found[exclusive] = found.pop(bound)
    return found
