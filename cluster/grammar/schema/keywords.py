"""JSON Schemas as they are read: every keyword is known or refused by name, references are resolved, combinations
multiplied out. What is left is a choice of plain schemas: a type, and what holds for values of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from cluster.grammar.asked import GrammarError

Schema = dict[str, Any]

STRING = frozenset({"minLength", "maxLength", "pattern", "format"})
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
COMBINED = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
CONSTRAINTS = STRING | NUMBER | ARRAY | OBJECT | COMBINED | {"type", "enum", "const"}
# They describe a schema and restrict nothing.
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
OFF = {"uniqueItems": False, "nullable": False}  # these values ask for nothing
MAX_CHOICES = 1000
MAX_SIZE = 100_000
LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


@dataclass(slots=True)
class Reader:
    """Reads the schemas inside one `root`."""

    root: Any
    _resolving: list[str] = field(default_factory=list)

    def checked(self, schema: Any, path: str) -> Schema:
        """The constraints of a schema; empty for one that allows anything.

        Raises:
            GrammarError: it is none, allows nothing, or has a keyword that is not enforced.
        """
        if schema is True:
            return {}
        if schema is False:
            raise GrammarError(f"{path}: false allows no value")
        if not isinstance(schema, dict):
            raise GrammarError(f"{path}: a schema must be an object or true")
        kept: Schema = {}
        for name, value in schema.items():
            if name in ANNOTATIONS or name.startswith("x-") or OFF.get(name, OFF) is value:
                continue
            if name not in CONSTRAINTS:
                raise GrammarError(f"{path}: the keyword {name[:60]!r} is not enforced; leave it out")
            if value is None and name != "const":
                raise GrammarError(f"{path}: {name} is null; leave it out")
            kept[name] = value
        if kept.get("uniqueItems"):
            raise GrammarError(f"{path}: the keyword 'uniqueItems' is not enforced; leave it out")
        return kept

    def resolved(self, reference: Any, path: str) -> Any:
        """What `$ref` points to: `#`, or a JSON pointer into the same schema."""
        if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
            raise GrammarError(f"{path}: $ref must point into the schema itself, as in #/$defs/name")
        found = self.root
        for part in reference.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise GrammarError(f"{path}: $ref {reference[:80]!r} points to nothing")
        return found

    def choices(self, schema: Any, path: str) -> list[Schema]:
        """Plain schemas, any of which may hold, instead of a schema with references and combinations."""
        kept = self.checked(schema, path)
        plain = {name: value for name, value in kept.items() if name not in COMBINED}
        found = [plain]
        if "$ref" in kept:
            reference = kept["$ref"]
            target = self.resolved(reference, path)
            if reference in self._resolving:
                raise GrammarError(f"{path}: $ref {reference[:80]!r} refers to itself beside other keywords")
            self._resolving.append(reference)
            found = _product(found, self.choices(target, reference), path)
            self._resolving.pop()
        for at, part in enumerate(parts_of(kept, "allOf", path)):
            found = _product(found, self.choices(part, f"{path}/allOf/{at}"), path)
        for name in ("anyOf", "oneOf"):
            if name in kept:
                arms = [self.choices(part, f"{path}/{name}/{at}") for at, part in enumerate(parts_of(kept, name, path))]
                if name == "oneOf":
                    self.check_apart(arms, path)
                found = _product(found, [choice for arm in arms for choice in arm], path)
        return found

    def check_apart(self, arms: list[list[Schema]], path: str) -> None:
        """Refuse a oneOf unless no value that comes out of one arm can be valid for another."""
        for at, arm in enumerate(arms):
            for other in arms[:at]:
                pairs = ((one, two) for one in arm for two in other)
                if not all(self._apart(one, two, path) and self._apart(two, one, path) for one, two in pairs):
                    raise GrammarError(
                        f"{path}: oneOf is not enforced unless its schemas exclude each other, by their types or by "
                        "a required property with other constants; write anyOf if they may overlap"
                    )

    def _apart(self, made: Schema, other: Schema, path: str) -> bool:
        """Whether a value made by one plain schema cannot be valid for another."""
        values, others = finite(made), finite(other)
        if values is not None and others is not None:
            return not {spelled(value) for value in values} & {spelled(value) for value in others}
        kinds, other_kinds = _kinds(made), _kinds(other)
        if not kinds & other_kinds:
            return True
        if kinds & other_kinds != {"object"}:
            return False
        names = made.get("properties", {})
        if is_closed(made) and set(other.get("required", ())) - names.keys() - set(made.get("required", ())):
            return True
        shared = (name for name in made.get("required", ()) if name in names and name in other.get("properties", {}))
        for name in shared:
            mine = self._constants(names[name], path)
            theirs = self._constants(other["properties"][name], path)
            if mine is not None and theirs is not None and not mine & theirs:
                return True
        return False

    def _constants(self, schema: Any, path: str) -> set[str] | None:
        try:
            found = [finite(choice) for choice in self.choices(schema, path)]
        except GrammarError:
            return None
        return None if None in found else {spelled(value) for values in found if values for value in values}


def parts_of(schema: Mapping[str, Any], name: str, path: str) -> list[Any]:
    """The schemas under allOf, anyOf, oneOf."""
    parts = schema.get(name, [])
    if not isinstance(parts, list) or (name in schema and not parts):
        raise GrammarError(f"{path}: {name} must be a list of schemas, and not an empty one")
    return parts


def finite(schema: Schema) -> list[Any] | None:
    """The values that a plain schema names with const and enum, of the types it allows; None where it names none."""
    named = [[schema["const"]]] if "const" in schema else []
    if "enum" in schema:
        if not isinstance(schema["enum"], list) or not schema["enum"]:
            raise GrammarError("enum must be a list of values, and not an empty one")
        named.append(schema["enum"])
    if not named:
        return None
    allowed = types_of(schema)
    found = {spelled(value): value for value in named[0] if allowed & _types_of_value(value)}
    for values in named[1:]:
        found = {text: found[text] for text in map(spelled, values) if text in found}
    return list(found.values())


def spelled(value: Any) -> str:
    """A value in a spelling that equal values share: 1 and 1.0 are one, true and 1 are two."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name!r}:{spelled(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spelled, value)) + "]"
    if isinstance(value, Decimal) and value == math.floor(value) and abs(value.adjusted()) < 400:
        return repr(int(value))
    return f"{value:f}".rstrip("0") if isinstance(value, Decimal) else repr(value)


def types_of(schema: Schema) -> set[str]:
    """The types that a plain schema allows. Without `type`, keywords of one type say which is meant."""
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


def _types_of_value(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | Decimal):
        return {"number", "integer"} if value == math.floor(value) else {"number"}
    return {"object" if isinstance(value, dict) else "array" if isinstance(value, list) else _plain_type(value)}


def _plain_type(value: Any) -> str:
    return "string" if isinstance(value, str) else "null"


def _kinds(schema: Schema) -> set[str]:
    """Types of which no two have a value in common; by what is named, where that says more."""
    values = finite(schema)
    types = types_of(schema) if values is None else {kind for value in values for kind in _types_of_value(value)}
    return {"number" if name == "integer" else name for name in types}


def size(schema: Schema, name: str) -> int | None:
    """The value of a keyword that counts something."""
    value = schema.get(name)
    if isinstance(value, Decimal) and value == math.floor(value) and value.adjusted() < 10:
        value = int(value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE):
        return value
    raise GrammarError(f"{name} must be an integer from 0 to {MAX_SIZE}")


def is_closed(schema: Schema) -> bool:
    """Whether objects have no properties but those that are declared."""
    extra = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    declares = bool(schema.keys() & {"properties", "patternProperties", "propertyNames"})
    return "patternProperties" not in schema and (extra is False or (extra is None and declares))


def _product(ones: list[Schema], twos: list[Schema], path: str) -> list[Schema]:
    if len(ones) * len(twos) > MAX_CHOICES:
        raise GrammarError(f"{path}: allOf, anyOf and oneOf multiply to more than {MAX_CHOICES} cases")
    found = [merged(one, two, path) for one in ones for two in twos]
    return [schema for schema in found if schema is not None] or _nothing(path)


def _nothing(path: str) -> list[Schema]:
    raise GrammarError(f"{path}: no value can hold all that it asks for")


def merged(one: Schema, two: Schema, path: str) -> Schema | None:
    """A plain schema for what holds in both; None if their types exclude each other.

    Raises:
        GrammarError: both say something that cannot be put into one schema.
    """
    for mine, other in ((one, two), (two, one)):
        extra = {"additionalProperties", "unevaluatedProperties", "patternProperties"} & mine.keys()
        beyond = other.get("properties", {}).keys() - mine.get("properties", {}).keys()
        if beyond and any(mine[name] is not True for name in extra):
            raise GrammarError(
                f"{path}: {min(extra)} is not enforced beside properties that another part of the schema declares"
            )
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
            raise GrammarError(f"{path}: no value is in every {name}")
        return one if name == "const" else [value for value in one if spelled(value) in both]
    if name in LARGER + SMALLER and all(isinstance(value, int | Decimal) for value in (one, two)):
        return max(one, two) if name in LARGER else min(one, two)
    if name == "required" and isinstance(one, list) and isinstance(two, list):
        return list(dict.fromkeys([*one, *two]))
    if name == "properties" and isinstance(one, dict) and isinstance(two, dict):
        shared_names = one.keys() & two.keys()
        return {**one, **two, **{key: {"allOf": [one[key], two[key]]} for key in shared_names}}
    raise GrammarError(f"{path}: {name} is not enforced where two parts of the schema say different things about it")
