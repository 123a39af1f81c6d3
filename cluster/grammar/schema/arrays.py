"""JSON arrays as grammars."""

from collections.abc import Callable
from typing import Any

from cluster.grammar.asked import GrammarError
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import EMPTY, NOTHING, Literal, Node, alt, repeat, seq
from cluster.grammar.schema.keywords import Schema, size
from cluster.grammar.schema.strings import COMMA, SPACES


def array_of(rules: Rules, first: list[Node], rest: Node | None, least: int, most: int | None) -> Node:
    """An array of `least` to `most` values: all of `first`, then any number of `rest`."""
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
    values = [part for at, value in enumerate(first) for part in ((COMMA, value) if at else (value,))]
    inside = seq(*values, tail, SPACES) if first else tail
    return rules.add(seq(Literal("["), SPACES, inside, Literal("]")))


def items_of(rules: Rules, schema: Schema, path: str, value: Callable[[Any, str], Node]) -> Node:
    """The array that a plain schema allows. `value` makes a value's grammar from schema and path."""
    least, most = size(schema, "minItems") or 0, size(schema, "maxItems")
    if most is not None and most < least:
        raise GrammarError(f"minItems {least} is more than maxItems {most}")
    prefix = schema.get("prefixItems", [])
    extra = schema.get("items", schema.get("unevaluatedItems"))
    if not isinstance(prefix, list) or isinstance(extra, list):
        raise GrammarError("prefixItems must be a list of schemas, and items one schema")
    if extra is False and least > len(prefix):
        raise GrammarError(f"minItems {least} is more than prefixItems allows")
    if extra is None:
        extra = not prefix or least > len(prefix)  # as for objects: nothing that is not declared, unless it must be
    first = [value(part, f"{path}/prefixItems/{at}") for at, part in enumerate(prefix)]
    rest = None if extra is False else value(extra, f"{path}/items")
    return array_of(rules, first, rest, least, most)
