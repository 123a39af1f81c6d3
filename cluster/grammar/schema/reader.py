"""Reads a JSON Schema into a list of plain schemas: schemas without references and combinations. A value is valid if
one of the plain schemas allows it. Every keyword is either known or refused by name. References are resolved, and
combinations (allOf, anyOf, oneOf, if) are multiplied out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.grammar.asked import GrammarError
from cluster.grammar.schema.keywords import (
    ANNOTATIONS,
    COMBINING_KEYWORDS,
    CONSTRAINTS,
    EXCLUDED_VALUES,
    EXTENSION_PREFIXES,
    INACTIVE_VALUES,
    UNEVALUATED_KEYWORDS,
    EmptyError,
    Schema,
    canonical_text,
    disjoint_types,
    enumerated_values,
    is_closed,
    is_false_schema,
    modernize,
)
from cluster.grammar.schema.merging import merge, with_unevaluated
from cluster.grammar.schema.references import References

MAX_CHOICES = 1000


@dataclass(slots=True)
class SchemaReader:
    """Reads the schemas inside a root; `references` resolves their `$ref`."""

    references: References
    _resolving: list[int] = field(default_factory=list)

    def constraints_of(self, schema: Any, path: str) -> Schema:
        """Return the constraints of a schema. They are empty if the schema allows any value.

        Raises:
            GrammarError: `schema` is not a schema, allows nothing, or has a keyword that is not enforced.
        """
        if schema is True:
            return {}
        if is_false_schema(schema):
            raise EmptyError(f"{path}: {'false' if schema is False else 'not'} allows no value")
        if not isinstance(schema, dict):
            raise GrammarError(f"{path}: a schema must be an object or true")
        constraints: Schema = {}
        for name, value in modernize(schema, path).items():
            if (
                name in ANNOTATIONS
                or name.startswith(EXTENSION_PREFIXES)
                or INACTIVE_VALUES.get(name, INACTIVE_VALUES) is value
            ):
                continue
            if name not in CONSTRAINTS:
                raise GrammarError(f"{path}: the keyword {name[:60]!r} is not enforced; leave it out")
            if value is None and name != "const":
                raise GrammarError(f"{path}: {name} is null; leave it out")
            constraints[name] = value
        return constraints

    def plain_schemas(self, schema: Any, path: str) -> list[Schema]:
        """Return plain schemas that are equivalent to a schema: a value is valid if at least one of them allows it."""
        constraints = self.constraints_of(schema, path)
        result: list[Schema] = [
            {
                name: value
                for name, value in constraints.items()
                if name not in COMBINING_KEYWORDS and name not in UNEVALUATED_KEYWORDS
            }
        ]
        if "not" in constraints:
            excluded = self._listed_values(constraints["not"], f"{path}/not")
            if excluded is None:
                raise GrammarError(f"{path}: not is not enforced unless it names values with const or enum")
            result[0][EXCLUDED_VALUES] = excluded
        if "$ref" in constraints:
            target = self.references.resolve(constraints["$ref"], schema, path)
            if id(target) in self._resolving:
                raise GrammarError(f"{path}: $ref {constraints['$ref'][:80]!r} refers to itself beside other keywords")
            self._resolving.append(id(target))
            result = self._product(result, self.plain_schemas(target, constraints["$ref"]), path)
            self._resolving.pop()
        for index, subschema in enumerate(subschemas_of(constraints, "allOf", path)):
            result = self._product(result, self.plain_schemas(subschema, f"{path}/allOf/{index}"), path)
        for name in ("anyOf", "oneOf"):
            if name in constraints:
                branches = [
                    self.plain_schemas(subschema, f"{path}/{name}/{index}")
                    for index, subschema in enumerate(subschemas_of(constraints, name, path))
                ]
                if name == "oneOf":
                    self.check_disjoint(branches, path)
                result = self._product(result, [plain_schema for branch in branches for plain_schema in branch], path)
        if "if" in constraints:
            result = self._product(result, self._conditional_schemas(constraints, path), path)
        for name in UNEVALUATED_KEYWORDS:
            if name in constraints:
                result = [with_unevaluated(plain_schema, name, constraints[name], path) for plain_schema in result]
        return result

    def _conditional_schemas(self, schema: Schema, path: str) -> list[Schema]:
        """Return plain schemas that are equivalent to `if`, `then` and `else` together: a valid value satisfies `if`
        and `then`, or it fails `if` and satisfies `else`.
        """
        failing = self._failing_schemas(schema["if"], f"{path}/if")
        satisfying = self.plain_schemas(schema["if"], f"{path}/if")
        result = []
        for if_schemas, name in ((satisfying, "then"), (failing, "else")):
            if schema.get(name, True) is not False:
                branch_schemas = self.plain_schemas(schema.get(name, True), f"{path}/{name}")
                result += self._merge_pairs(if_schemas, branch_schemas, path)
        return result or _raise_empty(path)

    def _failing_schemas(self, condition: Any, path: str) -> list[Schema]:
        """Return plain schemas for the values that fail the schema `condition` of an `if`. The condition must compare
        properties with constants.
        """
        constraints = self.constraints_of(condition, path)
        properties = constraints.get("properties", {})
        values_of_name = (
            {name: self._listed_values(subschema, path) for name, subschema in properties.items()}
            if isinstance(properties, dict)
            else {}
        )
        if (
            not values_of_name
            or None in values_of_name.values()
            or constraints.keys() - {"type", "properties", "required"}
        ):
            raise GrammarError(f"{path}: if is not enforced unless it compares properties with const or enum")
        return [
            {"type": "object", "properties": {name: {"not": {"enum": excluded}}}, "required": [name]}
            for name, excluded in values_of_name.items()
        ]

    def _product(self, left_schemas: list[Schema], right_schemas: list[Schema], path: str) -> list[Schema]:
        """Return plain schemas for the values that are valid for one of `left_schemas` and for one of `right_schemas`.

        Raises:
            EmptyError: there are no such values.
        """
        return self._merge_pairs(left_schemas, right_schemas, path) or _raise_empty(path)

    def _merge_pairs(self, left_schemas: list[Schema], right_schemas: list[Schema], path: str) -> list[Schema]:
        if len(left_schemas) * len(right_schemas) > MAX_CHOICES:
            raise GrammarError(f"{path}: allOf, anyOf and oneOf multiply to more than {MAX_CHOICES} cases")
        pairs = [(left, right) for left in left_schemas for right in right_schemas]
        if len(pairs) > 1:
            pairs = [(left, right) for left, right in pairs if not self._disjoint(left, right, path)]
        merged = [merge(left, right, path) for left, right in pairs]
        return [schema for schema in merged if schema is not None]

    def _disjoint(self, left: Schema, right: Schema, path: str) -> bool:
        """Return whether one property shows that no object is valid for both schemas. Both describe this property, at
        least one requires it, and no value of the property is valid for both.
        """
        left_properties, right_properties = left.get("properties", {}), right.get("properties", {})
        if not isinstance(left_properties, dict) or not isinstance(right_properties, dict):
            return False
        required = {*_string_items(left.get("required")), *_string_items(right.get("required"))}
        for name in required & left_properties.keys() & right_properties.keys():
            try:
                self.plain_schemas({"allOf": [left_properties[name], right_properties[name]]}, path)
            except EmptyError:
                return True
            except GrammarError:
                continue
        return False

    def check_disjoint(self, branches: list[list[Schema]], path: str) -> None:
        """Raise GrammarError unless the branches of a oneOf are disjoint: a value generated from a branch must not be
        valid for another branch. Each branch is a list of plain schemas.
        """
        for index, branch in enumerate(branches):
            for other_branch in branches[:index]:
                pairs = ((left, right) for left in branch for right in other_branch)
                if not all(
                    self._excludes(left, right, path) and self._excludes(right, left, path) for left, right in pairs
                ):
                    raise GrammarError(
                        f"{path}: oneOf is not enforced unless its schemas exclude each other, by their types or by "
                        "a required property with other constants; write anyOf if they may overlap"
                    )

    def _excludes(self, generated: Schema, other: Schema, path: str) -> bool:
        """Whether it is certain that no value generated from the plain schema `generated` is valid for `other`."""
        values, other_values = enumerated_values(generated), enumerated_values(other)
        if values is not None and other_values is not None:
            return not {canonical_text(value) for value in values} & {canonical_text(value) for value in other_values}
        types, other_types = disjoint_types(generated), disjoint_types(other)
        if not types & other_types:
            return True
        if types & other_types != {"object"}:
            return False
        properties = generated.get("properties", {})
        if is_closed(generated) and set(other.get("required", ())) - properties.keys() - set(
            generated.get("required", ())
        ):
            return True
        common_names = (
            name for name in generated.get("required", ()) if name in properties and name in other.get("properties", {})
        )
        for name in common_names:
            constants = self._constant_texts(properties[name], path)
            other_constants = self._constant_texts(other["properties"][name], path)
            if constants is not None and other_constants is not None and not constants & other_constants:
                return True
        return False

    def _constant_texts(self, schema: Any, path: str) -> set[str] | None:
        try:
            values = self._listed_values(schema, path)
        except GrammarError:
            return None
        return None if values is None else set(map(canonical_text, values))

    def _listed_values(self, schema: Any, path: str) -> list[Any] | None:
        """Return the values that a schema lists with enum or const, without duplicates. Return None if the schema
        allows other values too.
        """
        value_lists = [enumerated_values(plain_schema) for plain_schema in self.plain_schemas(schema, path)]
        if None in value_lists:
            return None
        return list({canonical_text(value): value for values in value_lists if values for value in values}.values())


def subschemas_of(schema: Mapping[str, Any], name: str, path: str) -> list[Any]:
    """Return the schemas under allOf, anyOf or oneOf."""
    subschemas = schema.get(name, [])
    if not isinstance(subschemas, list) or (name in schema and not subschemas):
        raise GrammarError(f"{path}: {name} must be a list of schemas, and not an empty one")
    return subschemas


def _string_items(required: Any) -> list[str]:
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def _raise_empty(path: str) -> list[Schema]:
    raise EmptyError(f"{path}: no value satisfies all its constraints")
