"""Merges two plain schemas into one for the values that are valid for both."""

from decimal import Decimal
from typing import Any

from cluster.grammar.asked import GrammarError
from cluster.grammar.schema.keywords import (
    EXCLUDED_VALUES,
    Schema,
    canonical_text,
    enumerated_values,
    is_false_schema,
    types_of,
)

LOWER_BOUNDS = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
UPPER_BOUNDS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
NO_COMMON_VALUE = object()
"""The result of merging two `enum` or two `const` without a common value."""


def merge(left: Schema, right: Schema, path: str) -> Schema | None:
    """Return a plain schema for the values that are valid for both. Return None if no value has a type that both allow
    and is in all lists of enum and const.

    Raises:
        GrammarError: the two have constraints that one schema cannot express together.
    """
    left, right = _with_other_properties(left, right, path), _with_other_properties(right, left, path)
    for schema, other in ((left, right), (right, left)):
        if {"items", "unevaluatedItems"} & schema.keys() and len(other.get("prefixItems", ())) > len(
            schema.get("prefixItems", ())
        ):
            raise GrammarError(f"{path}: items is not enforced beside longer prefixItems of another part of the schema")
    result = dict(left)
    for name, value in right.items():
        result[name] = _merge_keyword(name, left[name], value, path) if name in left else value
    if ("type" in result and not result["type"]) or NO_COMMON_VALUE in (result.get("enum"), result.get("const")):
        return None
    return result if enumerated_values(result) != [] else None


def _with_other_properties(schema: Schema, other: Schema, path: str) -> Schema:
    """Return `schema` with the properties added that only `other` declares. The schema of each added property is the
    `additionalProperties` of `schema`. If `schema` does not restrict undeclared properties, return it unchanged.
    """
    extra_keywords = {"additionalProperties", "unevaluatedProperties", "patternProperties"} & schema.keys()
    other_properties = other.get("properties", {})
    undeclared = (
        other_properties.keys() - schema.get("properties", {}).keys() if isinstance(other_properties, dict) else set()
    )
    if not undeclared or all(schema[name] is True for name in extra_keywords):
        return schema
    if extra_keywords != {"additionalProperties"}:
        raise GrammarError(
            f"{path}: {min(extra_keywords)} is not enforced beside properties that another part of the schema declares"
        )
    properties = schema.get("properties", {}) | dict.fromkeys(sorted(undeclared), schema["additionalProperties"])
    return schema | {"properties": properties}


def _merge_keyword(name: str, left: Any, right: Any, path: str) -> Any:
    if left == right and type(left) is type(right):
        return left
    if name == "type":
        left_types, right_types = types_of({"type": left}), types_of({"type": right})
        integers_in_both = ("number" in left_types and "integer" in right_types) or (
            "integer" in left_types and "number" in right_types
        )
        return sorted(left_types & right_types | ({"integer"} if integers_in_both else set()))
    if name in ("enum", "const"):
        values = [[left], [right]] if name == "const" else [left, right]
        common_values = {canonical_text(value) for value in values[0]} & {canonical_text(value) for value in values[1]}
        if not common_values:
            return NO_COMMON_VALUE
        return left if name == "const" else [value for value in left if canonical_text(value) in common_values]
    if name in LOWER_BOUNDS + UPPER_BOUNDS and all(isinstance(value, int | Decimal) for value in (left, right)):
        return max(left, right) if name in LOWER_BOUNDS else min(left, right)
    if name == "pattern":
        return tuple(dict.fromkeys([*_as_tuple(left), *_as_tuple(right)]))  # a tuple of patterns: all must match
    if name in ("additionalProperties", "unevaluatedProperties") and (is_false_schema(left) or is_false_schema(right)):
        return False
    if name == EXCLUDED_VALUES:
        return [*left, *right]
    if name == "required" and isinstance(left, list) and isinstance(right, list):
        return list(dict.fromkeys([*left, *right]))
    if name == "properties" and isinstance(left, dict) and isinstance(right, dict):
        merged_properties = {
            key: left[key] if left[key] == right[key] else {"allOf": [left[key], right[key]]}
            for key in left.keys() & right.keys()
        }
        return {**left, **right, **merged_properties}
    raise GrammarError(f"{path}: {name} is not enforced where two parts of the schema say different things about it")


def _as_tuple(pattern: Any) -> tuple[Any, ...]:
    return pattern if isinstance(pattern, tuple) else (pattern,)


def with_unevaluated(schema: Schema, name: str, value: Any, path: str) -> Schema:
    """Return the schema with the keyword `name` (unevaluatedProperties or unevaluatedItems) and its `value` added. If
    the schema itself describes every property or item, it is returned unchanged.
    """
    covering_keywords = ("additionalProperties",) if name == "unevaluatedProperties" else ("items",)
    if any(keyword in schema for keyword in covering_keywords):
        return schema  # such a keyword describes every property or item, so none is unevaluated
    return schema | {name: _merge_keyword(name, schema[name], value, path) if name in schema else value}
