"""JSON arrays as grammars."""

from collections.abc import Callable
from typing import Any

from cluster.grammar.asked import GrammarError
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import EMPTY, NO_MATCH, Literal, Node, alt, repeat, seq
from cluster.grammar.schema.keywords import (
    Schema,
    canonical_text,
    enumerated_values,
    is_false_schema,
    size_keyword,
    types_of,
)
from cluster.grammar.schema.ordered import in_order
from cluster.grammar.schema.strings import COMMA, SPACES, literal

# A set of at most this many values may be written in any order, which takes one rule per subset.
MAX_UNORDERED_VALUES = 6
VALUES_OF_TYPE: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}


def array_of(
    rules: Rules,
    prefix_items: list[Node],
    extra_item: Node | None,
    min_items: int,
    max_items: int | None,
    required_prefix: int | None = None,
) -> Node:
    """Return the grammar of arrays of `min_items` to `max_items` values: first the `prefix_items`, then any number of
    values `extra_item`, if that is not None. If `required_prefix` is None, all of `prefix_items` must be written.
    Otherwise the array may end after the first `required_prefix` of them.
    """
    prefix_items = prefix_items if max_items is None else prefix_items[:max_items]
    min_extra = max(0, min_items - len(prefix_items))
    max_extra = None if max_items is None else max_items - len(prefix_items)
    if extra_item is None or max_extra == 0:
        tail: Node = NO_MATCH if min_extra else EMPTY
    elif prefix_items:
        tail = repeat(rules.add(seq(COMMA, extra_item)), min_extra, max_extra)
    else:
        further_items = repeat(
            rules.add(seq(COMMA, extra_item)), max(0, min_extra - 1), None if max_extra is None else max_extra - 1
        )
        tail = seq(extra_item, further_items, SPACES)
        tail = tail if min_extra else alt(EMPTY, tail)
    content = seq(tail, SPACES) if prefix_items else tail
    for index in reversed(range(len(prefix_items))):
        content = seq(COMMA if index else EMPTY, prefix_items[index], content)
        if required_prefix is not None and index >= required_prefix:
            content = alt(SPACES if index else EMPTY, content)
    return rules.add(seq(Literal("["), SPACES, content, Literal("]")))


def array_of_schema(
    rules: Rules,
    schema: Schema,
    path: str,
    convert: Callable[[Any, str], Node],
    plain_schemas: Callable[[Any, str], list[Schema]],
) -> Node:
    """Return a grammar of the JSON arrays that are valid for a plain `schema`: one without references and without
    combinations such as anyOf. `convert(schema, path)` returns the grammar of any schema. `plain_schemas(schema, path)`
    returns a list of plain schemas that together mean the same: a value is valid if at least one of them allows it.
    """
    min_items, max_items = size_keyword(schema, "minItems") or 0, size_keyword(schema, "maxItems")
    if max_items is not None and max_items < min_items:
        raise GrammarError(f"minItems {min_items} is more than maxItems {max_items}")
    if schema.get("uniqueItems") and (max_items is None or max_items > 1):
        return _set_of(rules, schema, plain_schemas(schema.get("items", True), f"{path}/items"), min_items, max_items)
    prefix = schema.get("prefixItems", [])
    extra_schema = schema.get("items", schema.get("unevaluatedItems"))
    if not isinstance(prefix, list) or isinstance(extra_schema, list):
        raise GrammarError("prefixItems must be a list of schemas, and items one schema")
    if is_false_schema(extra_schema):
        extra_schema = False
    if extra_schema is False and min_items > len(prefix):
        raise GrammarError(f"minItems {min_items} is more than prefixItems allows")
    if extra_schema is None:
        # Without `items`, undeclared values are allowed only if nothing is declared or `minItems` needs them.
        extra_schema = not prefix or min_items > len(prefix)
    prefix_items = [convert(item_schema, f"{path}/prefixItems/{index}") for index, item_schema in enumerate(prefix)]
    extra_item = None if extra_schema is False else convert(extra_schema, f"{path}/items")
    return array_of(rules, prefix_items, extra_item, min_items, max_items, min_items if "minItems" in schema else None)


def _set_of(rules: Rules, schema: Schema, plain_schemas: list[Schema], min_items: int, max_items: int | None) -> Node:
    """Return the grammar of arrays of distinct values, each of which the schema names. If the schema names more than
    `MAX_UNORDERED_VALUES` values, an array must keep the schema's order.
    """
    values_by_schema = [_allowed_values(plain_schema) for plain_schema in plain_schemas]
    if "prefixItems" in schema or None in values_by_schema:
        raise GrammarError(
            "uniqueItems is not enforced unless items names its values with enum or const, because a grammar cannot "
            "remember what was written before; leave it out"
        )
    values: list[Node] = list(
        {canonical_text(value): literal(value) for listed in values_by_schema if listed for value in listed}.values()
    )
    if min_items > len(values):
        raise GrammarError(f"minItems {min_items} is more than the {len(values)} values that items names")
    max_items = len(values) if max_items is None else min(max_items, len(values))
    if len(values) <= MAX_UNORDERED_VALUES:
        content = _any_order(rules, values, min_items, max_items)
    else:
        ends: list[Node] = [
            NO_MATCH if count < min_items else SPACES if count else EMPTY for count in range(max_items + 1)
        ]
        content = in_order(rules, [(value, False) for value in values], ends, max_items)
    return rules.add(seq(Literal("["), SPACES, content, Literal("]")))


def _allowed_values(schema: Schema) -> list[Any] | None:
    """Return all values that a plain schema allows if it lists them with `enum` or `const`, or allows only booleans and
    null. Otherwise return None.
    """
    values = enumerated_values(schema)
    if values is None and types_of(schema) <= VALUES_OF_TYPE.keys() and schema.keys() <= {"type"}:
        values = [value for name in sorted(types_of(schema)) for value in VALUES_OF_TYPE[name]]
    return values


def _any_order(rules: Rules, values: list[Node], min_items: int, max_items: int) -> Node:
    """Return a rule for `min_items` to `max_items` of the values in any order, each at most once. There is one rule for
    each set of values already written.
    """
    rule_of_written: dict[frozenset[int], Node] = {}

    def rule(written_indices: frozenset[int]) -> Node:
        if written_indices not in rule_of_written:
            end: Node = NO_MATCH if len(written_indices) < min_items else SPACES if written_indices else EMPTY
            remaining = (
                [index for index in range(len(values)) if index not in written_indices]
                if len(written_indices) < max_items
                else []
            )
            comma = COMMA if written_indices else EMPTY
            rule_of_written[written_indices] = rules.add(
                alt(end, *(seq(comma, values[index], rule(written_indices | {index})) for index in remaining))
            )
        return rule_of_written[written_indices]

    return rule(frozenset())
