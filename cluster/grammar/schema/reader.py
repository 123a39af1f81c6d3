"""Reads a JSON Schema into a list of plain schemas (`keywords`); a value is valid if one of them allows it. Every
keyword is either known or refused by name. References are resolved, and combinations (allOf, anyOf, oneOf, if) are
multiplied out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.grammar.asked import GrammarError
from cluster.grammar.schema.keywords import (
    ANNOTATIONS,
    COMBINED,
    CONSTRAINTS,
    EXCLUDED,
    LATE,
    OFF,
    OWN,
    EmptyError,
    Schema,
    finite,
    is_closed,
    is_never,
    kinds_of,
    modern,
    spelled,
)
from cluster.grammar.schema.merging import merged, with_unevaluated
from cluster.grammar.schema.references import References

MAX_CHOICES = 1000


@dataclass(slots=True)
class SchemaReader:
    """Reads the schemas inside a root; `references` resolves their `$ref`."""

    references: References
    _resolving: list[int] = field(default_factory=list)

    def checked(self, schema: Any, path: str) -> Schema:
        """Return the constraints of a schema. They are empty if the schema allows any value.

        Raises:
            GrammarError: `schema` is not a schema, allows nothing, or has a keyword that is not enforced.
        """
        if schema is True:
            return {}
        if is_never(schema):
            raise EmptyError(f"{path}: {'false' if schema is False else 'not'} allows no value")
        if not isinstance(schema, dict):
            raise GrammarError(f"{path}: a schema must be an object or true")
        kept: Schema = {}
        for name, value in modern(schema, path).items():
            if name in ANNOTATIONS or name.startswith(OWN) or OFF.get(name, OFF) is value:
                continue
            if name not in CONSTRAINTS:
                raise GrammarError(f"{path}: the keyword {name[:60]!r} is not enforced; leave it out")
            if value is None and name != "const":
                raise GrammarError(f"{path}: {name} is null; leave it out")
            kept[name] = value
        return kept

    def choices(self, schema: Any, path: str) -> list[Schema]:
        """Return plain schemas that are equivalent to a schema: a value is valid if at least one of them allows it."""
        kept = self.checked(schema, path)
        found: list[Schema] = [
            {name: value for name, value in kept.items() if name not in COMBINED and name not in LATE}
        ]
        if "not" in kept:
            excluded = self._finite(kept["not"], f"{path}/not")
            if excluded is None:
                raise GrammarError(f"{path}: not is not enforced unless it names values with const or enum")
            found[0][EXCLUDED] = excluded
        if "$ref" in kept:
            target = self.references.resolved(kept["$ref"], schema, path)
            if id(target) in self._resolving:
                raise GrammarError(f"{path}: $ref {kept['$ref'][:80]!r} refers to itself beside other keywords")
            self._resolving.append(id(target))
            found = self._product(found, self.choices(target, kept["$ref"]), path)
            self._resolving.pop()
        for at, part in enumerate(parts_of(kept, "allOf", path)):
            found = self._product(found, self.choices(part, f"{path}/allOf/{at}"), path)
        for name in ("anyOf", "oneOf"):
            if name in kept:
                arms = [self.choices(part, f"{path}/{name}/{at}") for at, part in enumerate(parts_of(kept, name, path))]
                if name == "oneOf":
                    self.check_apart(arms, path)
                found = self._product(found, [choice for arm in arms for choice in arm], path)
        if "if" in kept:
            found = self._product(found, self._conditional(kept, path), path)
        for name in LATE:
            if name in kept:
                found = [with_unevaluated(choice, name, kept[name], path) for choice in found]
        return found

    def _conditional(self, schema: Schema, path: str) -> list[Schema]:
        """Return plain schemas of `if`, `then` and `else`: a value satisfies `if` and `then`, or it fails `if` and
        satisfies `else`.
        """
        fails = self._failing(schema["if"], f"{path}/if")
        held = self.choices(schema["if"], f"{path}/if")
        arms = []
        for ones, name in ((held, "then"), (fails, "else")):
            if schema.get(name, True) is not False:
                twos = self.choices(schema.get(name, True), f"{path}/{name}")
                arms += self._merged(ones, twos, path)
        return arms or _nothing(path)

    def _failing(self, condition: Any, path: str) -> list[Schema]:
        """Return plain schemas for the values that fail an `if`, which must compare properties with constants."""
        kept = self.checked(condition, path)
        named = kept.get("properties", {})
        values = {name: self._finite(part, path) for name, part in named.items()} if isinstance(named, dict) else {}
        if not values or None in values.values() or kept.keys() - {"type", "properties", "required"}:
            raise GrammarError(f"{path}: if is not enforced unless it compares properties with const or enum")
        return [
            {"type": "object", "properties": {name: {"not": {"enum": listed}}}, "required": [name]}
            for name, listed in values.items()
        ]

    def _product(self, ones: list[Schema], twos: list[Schema], path: str) -> list[Schema]:
        """Return plain schemas for the values that are valid for one of `ones` and for one of `twos`.

        Raises:
            EmptyError: there are no such values.
        """
        return self._merged(ones, twos, path) or _nothing(path)

    def _merged(self, ones: list[Schema], twos: list[Schema], path: str) -> list[Schema]:
        if len(ones) * len(twos) > MAX_CHOICES:
            raise GrammarError(f"{path}: allOf, anyOf and oneOf multiply to more than {MAX_CHOICES} cases")
        pairs = [(one, two) for one in ones for two in twos]
        if len(pairs) > 1:
            pairs = [(one, two) for one, two in pairs if not self._disjoint(one, two, path)]
        found = [merged(one, two, path) for one, two in pairs]
        return [schema for schema in found if schema is not None]

    def _disjoint(self, one: Schema, two: Schema, path: str) -> bool:
        """Whether no object is valid for both: a property that both describe, and at least one requires, has no value
        that is valid for both.
        """
        names, others = one.get("properties", {}), two.get("properties", {})
        if not isinstance(names, dict) or not isinstance(others, dict):
            return False
        required = {*_names_in(one.get("required")), *_names_in(two.get("required"))}
        for name in required & names.keys() & others.keys():
            try:
                self.choices({"allOf": [names[name], others[name]]}, path)
            except EmptyError:
                return True
            except GrammarError:
                continue
        return False

    def check_apart(self, arms: list[list[Schema]], path: str) -> None:
        """Raise unless the arms of a oneOf are disjoint: a value generated from an arm must not be valid for another
        arm.
        """
        for at, arm in enumerate(arms):
            for other in arms[:at]:
                pairs = ((one, two) for one in arm for two in other)
                if not all(self._apart(one, two, path) and self._apart(two, one, path) for one, two in pairs):
                    raise GrammarError(
                        f"{path}: oneOf is not enforced unless its schemas exclude each other, by their types or by "
                        "a required property with other constants; write anyOf if they may overlap"
                    )

    def _apart(self, made: Schema, other: Schema, path: str) -> bool:
        """Whether no value generated from the plain schema `made` is valid for `other`."""
        values, others = finite(made), finite(other)
        if values is not None and others is not None:
            return not {spelled(value) for value in values} & {spelled(value) for value in others}
        kinds, other_kinds = kinds_of(made), kinds_of(other)
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
            found = self._finite(schema, path)
        except GrammarError:
            return None
        return None if found is None else set(map(spelled, found))

    def _finite(self, schema: Any, path: str) -> list[Any] | None:
        """Return the values that a schema names, without duplicates. Return None if the schema allows other
        values too.
        """
        found = [finite(choice) for choice in self.choices(schema, path)]
        if None in found:
            return None
        return list({spelled(value): value for values in found if values for value in values}.values())


def parts_of(schema: Mapping[str, Any], name: str, path: str) -> list[Any]:
    """Return the schemas under allOf, anyOf or oneOf."""
    parts = schema.get(name, [])
    if not isinstance(parts, list) or (name in schema and not parts):
        raise GrammarError(f"{path}: {name} must be a list of schemas, and not an empty one")
    return parts


def _names_in(required: Any) -> list[str]:
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def _nothing(path: str) -> list[Schema]:
    raise EmptyError(f"{path}: no value can hold all that it asks for")
