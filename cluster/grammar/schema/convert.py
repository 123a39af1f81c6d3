"""JSON Schemas as grammars. Every output of the grammar is valid for the schema, but not every valid value is an
output. Properties come in the order of their declaration. If a schema declares properties or items, undeclared ones
come only if a keyword such as `additionalProperties` or `items` asks for them, or if `minItems` needs them.
"""

import json
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from cluster.grammar.asked import GrammarError
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import NO_MATCH, Literal, Node, Ref, alt, seq
from cluster.grammar.schema.arrays import array_of, array_of_schema
from cluster.grammar.schema.keywords import EXCLUDED_VALUES, Schema, enumerated_values, types_of, types_of_value
from cluster.grammar.schema.numbers import NUMBER, integer, number
from cluster.grammar.schema.objects import COLON, Members, members_of, object_of
from cluster.grammar.schema.reader import SchemaReader, subschemas_of
from cluster.grammar.schema.references import References
from cluster.grammar.schema.strings import any_string, literal, string

BOOLEAN = alt(Literal("true"), Literal("false"))
NULL = Literal("null")


def schema_grammar(schema: Any, compact: bool = False) -> str:
    """Return the grammar of a JSON schema in xgrammar's notation. `schema` is what `parse_exact_json` returns for the
    schema's text. If `compact`, outputs have no white space between JSON tokens.

    Raises:
        GrammarError: `schema` is not a schema, allows no value, or uses a keyword that is not enforced; the message
            usually says where.
    """
    converter = Converter(schema)
    return converter.rules.to_ebnf(converter.convert(converter.root, "#"), compact)


def object_grammar(compact: bool = False) -> str:
    """Return the grammar of any JSON object in xgrammar's notation. `compact` is as in `schema_grammar`."""
    converter = Converter(True)
    return converter.rules.to_ebnf(converter.any_object(), compact)


def parse_exact_json(text: str) -> Any:
    """Return the value of a JSON text. A number with a fraction or an exponent becomes a `Decimal`, so it stays exact.

    Raises:
        GrammarError: the text is not JSON.
    """
    try:
        return json.loads(text, parse_float=Decimal, parse_constant=_reject_constant)
    except ValueError as error:
        raise GrammarError(f"not JSON: {error}") from error


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number in JSON")


@dataclass(slots=True)
class Converter:
    """Converts the schemas inside one `root` to rules."""

    root: Any
    rules: Rules = field(default_factory=Rules)
    _rule_of_target: dict[int, Ref] = field(default_factory=dict)  # keyed by the id() of the schema
    _any_value_rule: Ref | None = None
    _references: References | None = None

    def convert(self, schema: Any, path: str) -> Node:
        """Return the grammar of the values that a schema allows. `path` is the schema's place, for error messages."""
        reader = self._schema_reader()
        constraints = reader.constraints_of(schema, path)
        names = constraints.keys()
        if not names:
            return self.any_value()
        if names == {"$ref"}:
            return self._reference_rule(
                reader.references.resolve(constraints["$ref"], schema, path), constraints["$ref"]
            )
        if len(names) == 1 and not names.isdisjoint(("anyOf", "oneOf", "allOf")):
            (name,) = names
            subschemas = subschemas_of(constraints, name, path)
            if name == "oneOf":
                reader.check_disjoint([reader.plain_schemas(subschema, path) for subschema in subschemas], path)
            if name != "allOf" or len(subschemas) == 1:
                return alt(
                    *(self.convert(subschema, f"{path}/{name}/{index}") for index, subschema in enumerate(subschemas))
                )
        return self.rules.add(
            alt(*(self._convert_plain(plain_schema, path) for plain_schema in reader.plain_schemas(schema, path)))
        )

    def _schema_reader(self) -> SchemaReader:
        if self._references is None:
            self._references = References(self.root)
        return SchemaReader(self._references)

    def _reference_rule(self, target: Any, reference: str) -> Node:
        """Return the rule of a schema that a reference points to. All references to a schema share one rule."""
        if id(target) not in self._rule_of_target:
            # Reserve the name first: the schema may refer to itself.
            self._rule_of_target[id(target)] = self.rules.reserve_name()
            self.rules.define(self._rule_of_target[id(target)], self.convert(target, reference))
        return self._rule_of_target[id(target)]

    def _convert_plain(self, schema: Schema, path: str) -> Node:
        try:
            values = enumerated_values(schema)
            if values is None:
                return alt(*(self._convert_type(name, schema, path) for name in sorted(types_of(schema))))
            other_keywords = schema.keys() - {"type", "enum", "const", EXCLUDED_VALUES}
            if other_keywords:
                raise GrammarError(f"{min(other_keywords)} is not enforced beside enum or const; leave it out")
            if not values:
                raise GrammarError("no value of enum is of the type")
            return alt(*map(literal, values))
        except GrammarError as error:
            raise error if str(error).startswith("#") else type(error)(f"{path}: {error}") from error

    def _convert_type(self, type_name: str, schema: Schema, path: str) -> Node:
        excluded = [value for value in schema.get(EXCLUDED_VALUES, ()) if type_name in types_of_value(value)]
        match type_name:
            case "string":
                return string(self.rules, schema, excluded)
            case "boolean":
                return alt(*(literal(value) for value in (True, False) if value not in excluded))
            case "null":
                return NO_MATCH if excluded else NULL
        if excluded:
            raise GrammarError(
                f"not is not enforced for a value of the type {type_name}; list the allowed values with enum"
            )
        match type_name:
            case "object":
                members = members_of(self.rules, schema, path, self.convert, self._plain_schemas)
                return object_of(self.rules, members)
            case "array":
                return array_of_schema(self.rules, schema, path, self.convert, self._plain_schemas)
            case "number":
                return number(self.rules, schema)
            case _:
                return integer(self.rules, schema)

    def _plain_schemas(self, schema: Any, path: str) -> list[Schema]:
        return self._schema_reader().plain_schemas(schema, path)

    def any_value(self) -> Node:
        """Return the grammar of any JSON value."""
        if self._any_value_rule is None:
            self._any_value_rule = self.rules.reserve_name()
            array = array_of(self.rules, [], self._any_value_rule, 0, None)
            alternatives = (self.any_object(), array, any_string(self.rules), NUMBER, BOOLEAN, NULL)
            self.rules.define(self._any_value_rule, alt(*alternatives))
        return self._any_value_rule

    def any_object(self) -> Node:
        """Return the grammar of any JSON object."""
        member = self.rules.add(seq(any_string(self.rules), COLON, self.any_value()))
        return object_of(self.rules, Members([], member, 0, None))
