"""JSON Schemas as grammars. Every output of the grammar is valid for the schema, but not every valid value is an
output: properties come in the order of their declaration, and undeclared properties or items come only if
`additionalProperties` or `items` asks for them.
"""

import json
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from cluster.grammar.asked import GrammarError
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import NOTHING, Literal, Node, Ref, alt, seq
from cluster.grammar.schema.arrays import array_of, items_of
from cluster.grammar.schema.keywords import EXCLUDED, Schema, finite, types_of, types_of_value
from cluster.grammar.schema.numbers import NUMBER, integer, number
from cluster.grammar.schema.objects import COLON, Members, members_of, object_of
from cluster.grammar.schema.reader import SchemaReader, parts_of
from cluster.grammar.schema.references import References
from cluster.grammar.schema.strings import any_string, literal, string

BOOLEAN = alt(Literal("true"), Literal("false"))
NULL = Literal("null")


def schema_grammar(schema: Any, compact: bool = False) -> str:
    """Return the grammar of a JSON schema, parsed by `loaded`, in xgrammar's notation. If `compact`, outputs have no
    white space between JSON tokens.

    Raises:
        GrammarError: `schema` is not a schema, or uses a keyword that is not enforced; the message says where.
    """
    converter = Converter(schema)
    return converter.rules.written(converter.value(converter.root, "#"), compact)


def object_grammar(compact: bool = False) -> str:
    """Return the grammar of any JSON object."""
    converter = Converter(True)
    return converter.rules.written(converter.any_object(), compact)


def loaded(text: str) -> Any:
    """Parse JSON with exact numbers.

    Raises:
        GrammarError: the text is not JSON.
    """
    try:
        return json.loads(text, parse_float=Decimal, parse_constant=_refuse)
    except ValueError as error:
        raise GrammarError(f"not JSON: {error}") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number in JSON")


@dataclass(slots=True)
class Converter:
    """Converts the schemas inside one `root` to rules."""

    root: Any
    rules: Rules = field(default_factory=Rules)
    _referred_to: dict[int, Ref] = field(default_factory=dict)  # keyed by the id() of the schema
    _any: Ref | None = None
    _places: References | None = None

    def value(self, schema: Any, path: str) -> Node:
        """Return the grammar of the values that a schema allows. `path` is the schema's place, for error messages."""
        reader = self._reader()
        kept = reader.checked(schema, path)
        names = kept.keys()
        if not names:
            return self.any_value()
        if names == {"$ref"}:
            return self._referred(reader.references.resolved(kept["$ref"], schema, path), kept["$ref"])
        if len(names) == 1 and not names.isdisjoint(("anyOf", "oneOf", "allOf")):
            (name,) = names
            parts = parts_of(kept, name, path)
            if name == "oneOf":
                reader.check_apart([reader.choices(part, path) for part in parts], path)
            if name != "allOf" or len(parts) == 1:
                return alt(*(self.value(part, f"{path}/{name}/{at}") for at, part in enumerate(parts)))
        return self.rules.add(alt(*(self._plain(choice, path) for choice in reader.choices(schema, path))))

    def _reader(self) -> SchemaReader:
        if self._places is None:
            self._places = References(self.root)
        return SchemaReader(self._places)

    def _referred(self, target: Any, reference: str) -> Node:
        """Return the rule of a schema that a reference points to. All references to a schema share one rule."""
        if id(target) not in self._referred_to:
            # Reserve the name first: the schema may refer to itself.
            self._referred_to[id(target)] = self.rules.reserve()
            self.rules.tell(self._referred_to[id(target)], self.value(target, reference))
        return self._referred_to[id(target)]

    def _plain(self, schema: Schema, path: str) -> Node:
        try:
            values = finite(schema)
            if values is None:
                return alt(*(self._typed(name, schema, path) for name in sorted(types_of(schema))))
            beside = schema.keys() - {"type", "enum", "const", EXCLUDED}
            if beside:
                raise GrammarError(f"{min(beside)} is not enforced beside enum or const; leave it out")
            if not values:
                raise GrammarError("no value of enum is of the type")
            return alt(*map(literal, values))
        except GrammarError as error:
            raise error if str(error).startswith("#") else type(error)(f"{path}: {error}") from error

    def _typed(self, name: str, schema: Schema, path: str) -> Node:
        excluded = [value for value in schema.get(EXCLUDED, ()) if name in types_of_value(value)]
        match name:
            case "string":
                return string(self.rules, schema, excluded)
            case "boolean":
                return alt(*(literal(value) for value in (True, False) if value not in excluded))
            case "null":
                return NOTHING if excluded else NULL
        if excluded:
            raise GrammarError(f"not is not enforced for a value of the type {name}; list the allowed values with enum")
        match name:
            case "object":
                members = members_of(self.rules, schema, path, self.value, self._choices)
                return object_of(self.rules, members)
            case "array":
                return items_of(self.rules, schema, path, self.value, self._choices)
            case "number":
                return number(self.rules, schema)
            case _:
                return integer(self.rules, schema)

    def _choices(self, schema: Any, path: str) -> list[Schema]:
        return self._reader().choices(schema, path)

    def any_value(self) -> Node:
        """Return the grammar of any JSON value."""
        if self._any is None:
            self._any = self.rules.reserve()
            array = array_of(self.rules, [], self._any, 0, None)
            parts = (self.any_object(), array, any_string(self.rules), NUMBER, BOOLEAN, NULL)
            self.rules.tell(self._any, alt(*parts))
        return self._any

    def any_object(self) -> Node:
        """Return the grammar of any JSON object."""
        member = self.rules.add(seq(any_string(self.rules), COLON, self.any_value()))
        return object_of(self.rules, Members([], member, 0, None))
