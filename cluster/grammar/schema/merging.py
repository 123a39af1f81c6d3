"""Merges two plain schemas into one for the values that are valid for both."""

from decimal import Decimal
from typing import Any

from cluster.grammar.asked import GrammarError
from cluster.grammar.schema.keywords import EXCLUDED, EmptyError, Schema, finite, is_never, spelled, types_of

LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


def merged(one: Schema, two: Schema, path: str) -> Schema | None:
    """Return a plain schema for the values that are valid for both. Return None if types, enum or const show that there
    is no such value.

    Raises:
        GrammarError: the two have constraints that one schema cannot express together.
    """
    one, two = _closing(one, two, path), _closing(two, one, path)
    for mine, other in ((one, two), (two, one)):
        if {"items", "unevaluatedItems"} & mine.keys() and len(other.get("prefixItems", ())) > len(
            mine.get("prefixItems", ())
        ):
            raise GrammarError(f"{path}: items is not enforced beside longer prefixItems of another part of the schema")
    found = dict(one)
    for name, value in two.items():
        found[name] = _both(name, one[name], value, path) if name in one else value
    if "type" in found and not found["type"]:
        return None
    return found if finite(found) != [] else None


def _closing(one: Schema, two: Schema, path: str) -> Schema:
    """Return `one` with the properties that only `two` declares. `additionalProperties` of `one` applies to these
    properties.
    """
    extra = {"additionalProperties", "unevaluatedProperties", "patternProperties"} & one.keys()
    named = two.get("properties", {})
    beyond = named.keys() - one.get("properties", {}).keys() if isinstance(named, dict) else set()
    if not beyond or all(one[name] is True for name in extra):
        return one
    if extra != {"additionalProperties"}:
        raise GrammarError(
            f"{path}: {min(extra)} is not enforced beside properties that another part of the schema declares"
        )
    properties = one.get("properties", {}) | dict.fromkeys(sorted(beyond), one["additionalProperties"])
    return one | {"properties": properties}


def _both(name: str, one: Any, two: Any, path: str) -> Any:
    if one == two and type(one) is type(two):
        return one
    if name == "type":
        mine, other = types_of({"type": one}), types_of({"type": two})
        whole = ("number" in mine and "integer" in other) or ("integer" in mine and "number" in other)
        return sorted(mine & other | ({"integer"} if whole else set()))
    if name in ("enum", "const"):
        values = [[one], [two]] if name == "const" else [one, two]
        both = {spelled(value) for value in values[0]} & {spelled(value) for value in values[1]}
        if not both:
            raise EmptyError(f"{path}: no value is in every {name}")
        return one if name == "const" else [value for value in one if spelled(value) in both]
    if name in LARGER + SMALLER and all(isinstance(value, int | Decimal) for value in (one, two)):
        return max(one, two) if name in LARGER else min(one, two)
    if name == "pattern":
        return tuple(dict.fromkeys([*_texts(one), *_texts(two)]))  # a tuple of patterns: all must match
    if name in ("additionalProperties", "unevaluatedProperties") and (is_never(one) or is_never(two)):
        return False
    if name == EXCLUDED:
        return [*one, *two]
    if name == "required" and isinstance(one, list) and isinstance(two, list):
        return list(dict.fromkeys([*one, *two]))
    if name == "properties" and isinstance(one, dict) and isinstance(two, dict):
        shared = {
            key: one[key] if one[key] == two[key] else {"allOf": [one[key], two[key]]}
            for key in one.keys() & two.keys()
        }
        return {**one, **two, **shared}
    raise GrammarError(f"{path}: {name} is not enforced where two parts of the schema say different things about it")


def _texts(pattern: Any) -> tuple[Any, ...]:
    return pattern if isinstance(pattern, tuple) else (pattern,)


def with_unevaluated(schema: Schema, name: str, value: Any, path: str) -> Schema:
    """Return the schema with the rule `name: value` for properties or items that no keyword of the schema describes."""
    others = ("additionalProperties",) if name == "unevaluatedProperties" else ("items",)
    if any(other in schema for other in others):
        return schema  # `others` describes every property or item, so the rule applies to none
    return schema | {name: _both(name, schema[name], value, path) if name in schema else value}
