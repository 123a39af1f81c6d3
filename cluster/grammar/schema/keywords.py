"""The keywords of JSON Schema, and functions on plain schemas. A plain schema has types and constraints on values of
these types, but no references and no combinations such as anyOf.
"""

import math
from decimal import Decimal
from typing import Any

from cluster.grammar.asked import GrammarError

Schema = dict[str, Any]

STRING_KEYWORDS = frozenset({"minLength", "maxLength", "pattern", "format", "contentEncoding"})
NUMBER_KEYWORDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
ARRAY_KEYWORDS = frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"})
OBJECT_KEYWORDS = frozenset(
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
KEYWORDS_OF_TYPE = {
    "string": STRING_KEYWORDS,
    "number": NUMBER_KEYWORDS,
    "integer": NUMBER_KEYWORDS,
    "array": ARRAY_KEYWORDS,
    "object": OBJECT_KEYWORDS,
}
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
COMBINING_KEYWORDS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"})
# These keywords are read last, because they apply to properties and items that no other part of the schema describes.
UNEVALUATED_KEYWORDS = ("unevaluatedProperties", "unevaluatedItems")
EXCLUDED_VALUES = "not in"  # not a JSON Schema keyword: in a plain schema, the values that `not` excludes
CONSTRAINTS = (
    STRING_KEYWORDS
    | NUMBER_KEYWORDS
    | ARRAY_KEYWORDS
    | OBJECT_KEYWORDS
    | COMBINING_KEYWORDS
    | {"type", "enum", "const"}
)
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
EXTENSION_PREFIXES = ("x-", "qt-")  # prefixes of OpenAPI's extensions and of quicktype's notes about its samples
INACTIVE_VALUES = {"uniqueItems": False, "nullable": False}  # with these values the keywords restrict nothing
MAX_SIZE = 100_000


class EmptyError(GrammarError):
    """No value satisfies a schema."""


def enumerated_values(schema: Schema) -> list[Any] | None:
    """Return the values that const and enum list (both, if both are given), without those that the type or `not` of the
    plain schema excludes. Return None if the schema has neither const nor enum.
    """
    value_lists = [[schema["const"]]] if "const" in schema else []
    if "enum" in schema:
        if not isinstance(schema["enum"], list) or not schema["enum"]:
            raise GrammarError("enum must be a list of values, and not an empty one")
        value_lists.append(schema["enum"])
    if not value_lists:
        return None
    allowed_types = types_of(schema)
    excluded = set(map(canonical_text, schema.get(EXCLUDED_VALUES, ())))
    values_by_text = {canonical_text(value): value for value in value_lists[0] if allowed_types & types_of_value(value)}
    values_by_text = {text: value for text, value in values_by_text.items() if text not in excluded}
    for values in value_lists[1:]:
        values_by_text = {text: values_by_text[text] for text in map(canonical_text, values) if text in values_by_text}
    return list(values_by_text.values())


def canonical_text(value: Any) -> str:
    """Return a spelling that only equal values share. 1 and 1.0 have the same spelling; true and 1 do not."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name!r}:{canonical_text(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical_text, value)) + "]"
    if isinstance(value, Decimal) and value == math.floor(value) and abs(value.adjusted()) < 400:
        return repr(int(value))
    return f"{value:f}".rstrip("0") if isinstance(value, Decimal) else repr(value)


def types_of(schema: Schema) -> set[str]:
    """Return the types that a plain schema allows. Without the keyword `type`, the type is the one to which the other
    keywords of the schema apply; if there are no such keywords, all types are allowed.
    """
    type_value = schema.get("type")
    if type_value is None:
        implied_types = {kind for kind, keywords in KEYWORDS_OF_TYPE.items() if keywords & schema.keys()} - {"integer"}
        if len(implied_types) > 1:
            raise GrammarError(f"say which type is meant: there are keywords of {' and '.join(sorted(implied_types))}")
        return implied_types or set(TYPES)
    names = [type_value] if isinstance(type_value, str) else type_value
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


def disjoint_types(schema: Schema) -> set[str]:
    """Return the types of a plain schema's values. Integer counts as number, so that no two types share a value."""
    values = enumerated_values(schema)
    types = types_of(schema) if values is None else {kind for value in values for kind in types_of_value(value)}
    return {"number" if name == "integer" else name for name in types}


def size_keyword(schema: Schema, name: str) -> int | None:
    """Return the value of a keyword that counts something, such as `minItems`, or None if the keyword is absent."""
    value = schema.get(name)
    if isinstance(value, Decimal) and value == math.floor(value) and value.adjusted() < 10:
        value = int(value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE):
        return value
    raise GrammarError(f"{name} must be an integer from 0 to {MAX_SIZE}")


def is_closed(schema: Schema) -> bool:
    """Whether the grammar of this plain schema allows only properties that the schema declares or requires, or that
    `propertyNames` allows. With `patternProperties`, the result is always False.
    """
    extra_schema = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    declares_names = bool(schema.keys() & {"properties", "patternProperties", "propertyNames"})
    return "patternProperties" not in schema and (extra_schema is False or (extra_schema is None and declares_names))


def is_false_schema(schema: Any) -> bool:
    """Whether a schema is false, or `{"not": {}}` or `{"not": true}`, which generators write for false."""
    return schema is False or (isinstance(schema, dict) and schema.get("not") in ({}, True) and "not" in schema)


def modernize(schema: Schema, path: str) -> Schema:
    """Convert a schema of an older draft or OpenAPI 3.0 to 2020-12: `items`, `nullable`, Boolean exclusive bounds."""
    modern_schema = dict(schema)
    if isinstance(modern_schema.get("items"), list):
        if "prefixItems" in modern_schema:
            raise GrammarError(f"{path}: prefixItems must be a list of schemas, and items one schema")
        modern_schema["prefixItems"] = modern_schema.pop("items")
        if "additionalItems" in modern_schema:
            modern_schema["items"] = modern_schema["additionalItems"]
    modern_schema.pop("additionalItems", None)  # if `items` is not a list, this keyword has no effect
    if modern_schema.get("nullable") is True and isinstance(modern_schema.get("type"), str):
        modern_schema["type"] = [modern_schema["type"], "null"]
        del modern_schema["nullable"]
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(modern_schema.get(exclusive), bool) and modern_schema.pop(exclusive):
            if bound not in modern_schema:
                raise GrammarError(f"{path}: {exclusive} is true without {bound}; write the bound as its value")
            modern_schema[exclusive] = modern_schema.pop(bound)
    return modern_schema
