"""JSON objects as grammars: declared properties in the order of their declaration, then undeclared properties."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from cluster.grammar.asked import GrammarError
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import EMPTY, NO_MATCH, Literal, Node, Whitespace, alt, chars_of, minus, repeat, seq
from cluster.grammar.schema.keywords import (
    EXCLUDED_VALUES,
    EmptyError,
    Schema,
    canonical_text,
    enumerated_values,
    is_closed,
    is_false_schema,
    size_keyword,
)
from cluster.grammar.schema.ordered import in_order
from cluster.grammar.schema.strings import COMMA, SPACES, UNESCAPED, any_string, literal, quoted_string, string

COLON = seq(Literal(":"), Whitespace(alt(EMPTY, Literal(" "))))
NAME_KEYWORDS = frozenset({"type", "pattern", "minLength", "maxLength", "format", "contentEncoding", "enum", "const"})


@dataclass(slots=True)
class Members:
    """The members that an object may have. The `ordered_members` come first, each given as (grammar of the member,
    whether it is required). Then come any number of members `extra_member`, if that is not None. `min_properties` and
    `max_properties` limit the number of all members.
    """

    ordered_members: list[tuple[Node, bool]]
    extra_member: Node | None
    min_properties: int
    max_properties: int | None


def object_of(rules: Rules, members: Members) -> Node:
    """Return the grammar of objects with these members."""
    max_counted = max(1, members.min_properties if members.max_properties is None else members.max_properties)
    content = in_order(rules, members.ordered_members, _tail(rules, members, max_counted), members.max_properties)
    return rules.add(seq(Literal("{"), SPACES, content, Literal("}")))


def _tail(rules: Rules, members: Members, max_counted: int) -> list[Node]:
    """Return a list of `max_counted` + 1 grammars. Grammar n is for what may follow the declared members if n members
    have been written. The last grammar is also for more members.
    """
    ends: list[Node] = [SPACES if num_written else EMPTY for num_written in range(max_counted + 1)]
    ends[: members.min_properties] = [NO_MATCH] * members.min_properties
    if members.extra_member is None or members.max_properties == 0:
        return ends
    further_member = seq(COMMA, members.extra_member)
    if members.max_properties is None:
        repetition = rules.reserve_name()
        rules.define(repetition, alt(ends[max_counted], seq(further_member, repetition)))
        states: list[Node] = [repetition]
    else:
        states = [ends[max_counted]]
    for num_written in range(max_counted - 1, -1, -1):
        member = further_member if num_written else members.extra_member
        states.insert(0, rules.add(alt(ends[num_written], seq(member, states[0]))))
    return states


def members_of(
    rules: Rules,
    schema: Schema,
    path: str,
    convert: Callable[[Any, str], Node],
    plain_schemas: Callable[[Any, str], list[Schema]],
) -> Members:
    """Return the members that a plain schema of an object allows. `convert` returns the grammar of a schema at a path;
    `plain_schemas` returns the plain schemas of a schema at a path.
    """
    declared, required = _declared_properties(schema), _required_names(schema)
    min_properties, max_properties = size_keyword(schema, "minProperties") or 0, size_keyword(schema, "maxProperties")
    extra_schema, patterns = _extra_schema(schema), schema.get("patternProperties", {})
    if not isinstance(patterns, dict):
        raise GrammarError("patternProperties must be an object")
    name_schemas = None
    if "propertyNames" in schema:
        name_schemas = _check_name_schemas(
            plain_schemas({"allOf": [{"type": "string"}, schema["propertyNames"]]}, f"{path}/propertyNames")
        )
        listed_names = _listed_names(name_schemas)
        if listed_names is not None:  # all allowed names are listed, so no other members are allowed
            undeclared_schema = False if patterns else True if extra_schema is None else extra_schema
            declared = {name: declared.get(name, undeclared_schema) for name in listed_names}
            name_schemas, extra_schema = None, False
    if extra_schema is False and (missing := [name for name in required if name not in declared and not patterns]):
        raise GrammarError(f"required names {missing[0][:60]!r}, which no property declares")
    for name in required:
        allows_any = extra_schema is None or any(_matches(pattern, name) for pattern in patterns)
        declared.setdefault(name, True if allows_any else extra_schema)
    for pattern, value in patterns.items():
        for name in declared:
            if _matches(pattern, name):
                declared[name] = {"allOf": [declared[name], value]}
    ordered = []
    for name, member_schema in declared.items():
        try:
            value = convert(member_schema, f"{path}/properties/{name[:60]}")
        except EmptyError:
            if name in required:
                raise
            continue  # no value is valid for the schema, so the optional property is never written
        ordered.append((seq(literal(name), COLON, value), name in required))
    undeclared = _undeclared_members(rules, schema, name_schemas, declared, extra_schema)
    undeclared_schema = None
    if undeclared is not None:
        key, value, keyword = undeclared
        undeclared_schema = rules.add(seq(key, COLON, convert(value, f"{path}/{keyword}")))
        if min_properties > max(1, len(required)):
            raise GrammarError("minProperties is not enforced where names are free: one may come twice")
    return Members(ordered, undeclared_schema, min_properties, max_properties)


def _undeclared_members(
    rules: Rules, schema: Schema, name_schemas: list[Schema] | None, declared: dict[str, Any], extra_schema: Any
) -> tuple[Node, Any, str] | None:
    """Return the grammar of the keys of undeclared members, the schema of their values, and the keyword that allows
    them. Return None if undeclared members are not allowed.
    """
    patterns = schema.get("patternProperties", {})
    if patterns:
        if extra_schema not in (None, False) or name_schemas is not None:
            raise GrammarError("patternProperties is not enforced beside additionalProperties or propertyNames")
        if len({canonical_text(value_schema) for value_schema in patterns.values()}) > 1:
            raise GrammarError("patternProperties is not enforced for several patterns with schemas of their own")
        keys = [
            string(rules, {"pattern": pattern}, [name for name in declared if _matches(pattern, name)])
            for pattern in patterns
        ]
        return alt(*keys), next(iter(patterns.values())), "patternProperties"
    if name_schemas is not None and declared:
        raise GrammarError("propertyNames is not enforced beside properties; leave one of them out")
    if extra_schema is False or (extra_schema is None and is_closed(schema) and name_schemas is None):
        return None
    value_schema = True if extra_schema is None else extra_schema
    if name_schemas is None:
        return _undeclared_key(rules, declared), value_schema, "additionalProperties"
    return (
        alt(*(string(rules, choice, choice.get(EXCLUDED_VALUES, ())) for choice in name_schemas)),
        value_schema,
        "additionalProperties",
    )


def _check_name_schemas(name_schemas: list[Schema]) -> list[Schema]:
    """Return `name_schemas`, which are plain schemas of names.

    Raises:
        GrammarError: a schema has a keyword that is not enforced.
    """
    for name_schema in name_schemas:
        if name_schema.get("type") not in ("string", ["string"]) or name_schema.keys() - NAME_KEYWORDS - {
            EXCLUDED_VALUES
        }:
            raise GrammarError(
                "propertyNames is enforced for pattern, minLength, maxLength, format, enum and const only"
            )
    return name_schemas


def _listed_names(name_schemas: list[Schema]) -> list[str] | None:
    """Return the allowed names if the schemas list all of them, otherwise None."""
    value_lists = [enumerated_values(name_schema) for name_schema in name_schemas]
    return (
        None
        if None in value_lists
        else list(dict.fromkeys(name for values in value_lists if values for name in values))
    )


def _undeclared_key(rules: Rules, declared: Collection[str]) -> Node:
    """Return the grammar of keys that are not in `declared`. If there are declared names, the keys have no escapes, so
    that no key is another spelling of a declared name.
    """
    if not declared:
        return any_string(rules)
    unescaped_names = [name for name in declared if literal(name) == Literal(f'"{name}"')]
    return quoted_string(rules, _different_name(unescaped_names) if unescaped_names else repeat(UNESCAPED))


def _different_name(excluded_names: list[str]) -> Node:
    """Return the grammar of all texts without escapes that differ from each of `excluded_names`."""
    first_chars = sorted({name[0] for name in excluded_names if name})
    end_node: Node = NO_MATCH if "" in excluded_names else EMPTY
    other_start = seq(minus(UNESCAPED, chars_of("".join(first_chars))), repeat(UNESCAPED))
    suffixes_of_char = (
        (first_char, [name[1:] for name in excluded_names if name.startswith(first_char)]) for first_char in first_chars
    )
    return alt(
        end_node,
        other_start,
        *(seq(chars_of(first_char), _different_name(suffixes)) for first_char, suffixes in suffixes_of_char),
    )


def _extra_schema(schema: Schema) -> Any:
    """Return the schema of undeclared members (a schema, true or false), or None if `schema` does not give it."""
    extra_schema = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    return False if is_false_schema(extra_schema) else extra_schema


def _declared_properties(schema: Schema) -> dict[str, Any]:
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise GrammarError("properties must be an object")
    return dict(properties)


def _required_names(schema: Schema) -> list[str]:
    names = schema.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise GrammarError("required must be a list of names")
    return list(dict.fromkeys(names))


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error as error:
        raise GrammarError(f"patternProperties: {error}") from error
