"""JSON arrays as grammars."""

from collections.abc import Callable
from typing import Any

from cluster.grammar.asked import GrammarError
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import EMPTY, NOTHING, Literal, Node, alt, repeat, seq
from cluster.grammar.schema.keywords import Schema, finite, is_never, size, spelled, types_of
from cluster.grammar.schema.ordered import in_order
from cluster.grammar.schema.strings import COMMA, SPACES, literal

ANY_ORDER = 6  # a set of at most this many values may be written in any order, which takes one rule per subset
FEW_VALUES: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}


def array_of(
    rules: Rules, first: list[Node], rest: Node | None, least: int, most: int | None, sure: int | None = None
) -> Node:
    """Return an array of `least` to `most` values: the values `first`, then any number of values `rest`. If `sure` is
    None, all of `first` must be written. Otherwise the array may end after the first `sure` of them.
    """
    first = first if most is None else first[:most]
    fewest = max(0, least - len(first))
    room = None if most is None else most - len(first)
    if rest is None or room == 0:
        tail: Node = NOTHING if fewest else EMPTY
    elif first:
        tail = repeat(rules.add(seq(COMMA, rest)), fewest, room)
    else:
        more = repeat(rules.add(seq(COMMA, rest)), max(0, fewest - 1), None if room is None else room - 1)
        tail = seq(rest, more, SPACES)
        tail = tail if fewest else alt(EMPTY, tail)
    inside = seq(tail, SPACES) if first else tail
    for at in reversed(range(len(first))):
        inside = seq(COMMA if at else EMPTY, first[at], inside)
        if sure is not None and at >= sure:
            inside = alt(SPACES if at else EMPTY, inside)
    return rules.add(seq(Literal("["), SPACES, inside, Literal("]")))


def items_of(
    rules: Rules,
    schema: Schema,
    path: str,
    value: Callable[[Any, str], Node],
    choices: Callable[[Any, str], list[Schema]],
) -> Node:
    """Return the array that a plain schema allows. `value` returns the grammar of a schema at a path; `choices` returns
    the plain schemas of a schema at a path.
    """
    least, most = size(schema, "minItems") or 0, size(schema, "maxItems")
    if most is not None and most < least:
        raise GrammarError(f"minItems {least} is more than maxItems {most}")
    if schema.get("uniqueItems") and (most is None or most > 1):
        return _set_of(rules, schema, choices(schema.get("items", True), f"{path}/items"), least, most)
    prefix = schema.get("prefixItems", [])
    extra = schema.get("items", schema.get("unevaluatedItems"))
    if not isinstance(prefix, list) or isinstance(extra, list):
        raise GrammarError("prefixItems must be a list of schemas, and items one schema")
    if is_never(extra):
        extra = False
    if extra is False and least > len(prefix):
        raise GrammarError(f"minItems {least} is more than prefixItems allows")
    if extra is None:
        # Without `items`, undeclared values are allowed only if nothing is declared or `minItems` needs them.
        extra = not prefix or least > len(prefix)
    first = [value(part, f"{path}/prefixItems/{at}") for at, part in enumerate(prefix)]
    rest = None if extra is False else value(extra, f"{path}/items")
    return array_of(rules, first, rest, least, most, least if "minItems" in schema else None)


def _set_of(rules: Rules, schema: Schema, choices: list[Schema], least: int, most: int | None) -> Node:
    """Return an array of distinct values that the schema names. If there are more than `ANY_ORDER` values, they come in
    the schema's order.
    """
    named = [_values(choice) for choice in choices]
    if "prefixItems" in schema or None in named:
        raise GrammarError(
            "uniqueItems is not enforced unless items names its values with enum or const, because a grammar cannot "
            "remember what was written before; leave it out"
        )
    values: list[Node] = list({spelled(value): literal(value) for part in named if part for value in part}.values())
    if least > len(values):
        raise GrammarError(f"minItems {least} is more than the {len(values)} values that items names")
    most = len(values) if most is None else min(most, len(values))
    if len(values) <= ANY_ORDER:
        inside = _any_order(rules, values, least, most)
    else:
        ends: list[Node] = [NOTHING if count < least else SPACES if count else EMPTY for count in range(most + 1)]
        inside = in_order(rules, [(value, False) for value in values], ends, most)
    return rules.add(seq(Literal("["), SPACES, inside, Literal("]")))


def _values(schema: Schema) -> list[Any] | None:
    """Return all values that a plain schema allows, or None if the schema does not name them."""
    found = finite(schema)
    if found is None and types_of(schema) <= FEW_VALUES.keys() and schema.keys() <= {"type"}:
        found = [value for name in sorted(types_of(schema)) for value in FEW_VALUES[name]]
    return found


def _any_order(rules: Rules, values: list[Node], least: int, most: int) -> Node:
    """Return a rule for `least` to `most` of the values in any order, each at most once. There is one rule for each set
    of values already written.
    """
    states: dict[frozenset[int], Node] = {}

    def state(written: frozenset[int]) -> Node:
        if written not in states:
            end: Node = NOTHING if len(written) < least else SPACES if written else EMPTY
            left = [at for at in range(len(values)) if at not in written] if len(written) < most else []
            comma = COMMA if written else EMPTY
            states[written] = rules.add(alt(end, *(seq(comma, values[at], state(written | {at})) for at in left)))
        return states[written]

    return state(frozenset())
