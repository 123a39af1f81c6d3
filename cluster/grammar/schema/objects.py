"""JSON objects as grammars: declared properties in the order of their declaration, then undeclared properties."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from cluster.grammar.asked import GrammarError
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import EMPTY, NOTHING, Blank, Literal, Node, alt, minus, one_of, repeat, seq
from cluster.grammar.schema.keywords import EXCLUDED, EmptyError, Schema, finite, is_closed, is_never, size, spelled
from cluster.grammar.schema.ordered import in_order
from cluster.grammar.schema.strings import COMMA, PLAIN, SPACES, any_string, literal, quoted, string

COLON = seq(Literal(":"), Blank(alt(EMPTY, Literal(" "))))
NAMED_BY = frozenset({"type", "pattern", "minLength", "maxLength", "format", "contentEncoding", "enum", "const"})


@dataclass(slots=True)
class Members:
    """The members that an object may have. `ordered` members come first, as (member, whether it is required); then any
    number of `extra` members, if `extra` is not None. `least` and `most` limit the number of all members.
    """

    ordered: list[tuple[Node, bool]]
    extra: Node | None
    least: int
    most: int | None


def object_of(rules: Rules, members: Members) -> Node:
    """Return an object with these members."""
    cap = max(1, members.least if members.most is None else members.most)
    inside = in_order(rules, members.ordered, _tail(rules, members, cap), members.most)
    return rules.add(seq(Literal("{"), SPACES, inside, Literal("}")))


def _tail(rules: Rules, members: Members, cap: int) -> list[Node]:
    """Return a list: entry n is what may follow the declared members if n members have been written. The last entry,
    `cap`, also holds for more members.
    """
    ends: list[Node] = [SPACES if written else EMPTY for written in range(cap + 1)]
    ends[: members.least] = [NOTHING] * members.least
    if members.extra is None or members.most == 0:
        return ends
    more = seq(COMMA, members.extra)
    if members.most is None:
        full = rules.reserve()
        rules.tell(full, alt(ends[cap], seq(more, full)))
        states: list[Node] = [full]
    else:
        states = [ends[cap]]
    for written in range(cap - 1, -1, -1):
        one = more if written else members.extra
        states.insert(0, rules.add(alt(ends[written], seq(one, states[0]))))
    return states


def members_of(
    rules: Rules,
    schema: Schema,
    path: str,
    value: Callable[[Any, str], Node],
    choices: Callable[[Any, str], list[Schema]],
) -> Members:
    """Return the members that a plain schema of an object allows. `value` returns the grammar of a schema at a path;
    `choices` returns the plain schemas of a schema at a path.
    """
    declared, required = _declared(schema), _required(schema)
    least, most = size(schema, "minProperties") or 0, size(schema, "maxProperties")
    extra, patterns = _extra(schema), schema.get("patternProperties", {})
    if not isinstance(patterns, dict):
        raise GrammarError("patternProperties must be an object")
    names = None
    if "propertyNames" in schema:
        names = _plain_names(choices({"allOf": [{"type": "string"}, schema["propertyNames"]]}, f"{path}/propertyNames"))
        listed = _listed(names)
        if listed is not None:  # the names are listed, so there are no other members
            other = False if patterns else True if extra is None else extra
            declared = {name: declared.get(name, other) for name in listed}
            names, extra = None, False
    if extra is False and (missing := [name for name in required if name not in declared and not patterns]):
        raise GrammarError(f"required names {missing[0][:60]!r}, which no property declares")
    for name in required:
        described = extra is None or any(_matches(pattern, name) for pattern in patterns)
        declared.setdefault(name, True if described else extra)
    for pattern, inside in patterns.items():
        for name in declared:
            if _matches(pattern, name):
                declared[name] = {"allOf": [declared[name], inside]}
    ordered = []
    for name, part in declared.items():
        try:
            inside = value(part, f"{path}/properties/{name[:60]}")
        except EmptyError:
            if name in required:
                raise
            continue  # no value is valid for the schema, so the optional property is never written
        ordered.append((seq(literal(name), COLON, inside), name in required))
    keyed = _keyed(rules, schema, names, declared, extra)
    other = None
    if keyed is not None:
        key, inside, where = keyed
        other = rules.add(seq(key, COLON, value(inside, f"{path}/{where}")))
        if least > max(1, len(required)):
            raise GrammarError("minProperties is not enforced where names are free: one may come twice")
    return Members(ordered, other, least, most)


def _keyed(
    rules: Rules, schema: Schema, names: list[Schema] | None, declared: dict[str, Any], extra: Any
) -> tuple[Node, Any, str] | None:
    """Return the key and schema of undeclared members, and the keyword that allows them. Return None if undeclared
    members are not allowed.
    """
    patterns = schema.get("patternProperties", {})
    if patterns:
        if extra not in (None, False) or names is not None:
            raise GrammarError("patternProperties is not enforced beside additionalProperties or propertyNames")
        if len({spelled(inside) for inside in patterns.values()}) > 1:
            raise GrammarError("patternProperties is not enforced for several patterns with schemas of their own")
        keys = [
            string(rules, {"pattern": pattern}, [name for name in declared if _matches(pattern, name)])
            for pattern in patterns
        ]
        return alt(*keys), next(iter(patterns.values())), "patternProperties"
    if names is not None and declared:
        raise GrammarError("propertyNames is not enforced beside properties; leave one of them out")
    if extra is False or (extra is None and is_closed(schema) and names is None):
        return None
    inside = True if extra is None else extra
    if names is None:
        return _other_key(rules, declared), inside, "additionalProperties"
    return alt(*(string(rules, choice, choice.get(EXCLUDED, ())) for choice in names)), inside, "additionalProperties"


def _plain_names(choices: list[Schema]) -> list[Schema]:
    """Return `choices`, which are plain schemas of names.

    Raises:
        GrammarError: a schema has a keyword that is not enforced.
    """
    for choice in choices:
        if choice.get("type") not in ("string", ["string"]) or choice.keys() - NAMED_BY - {EXCLUDED}:
            raise GrammarError(
                "propertyNames is enforced for pattern, minLength, maxLength, format, enum and const only"
            )
    return choices


def _listed(names: list[Schema]) -> list[str] | None:
    """Return the allowed names if the schemas list all of them, otherwise None."""
    found = [finite(choice) for choice in names]
    return None if None in found else list(dict.fromkeys(name for values in found if values for name in values))


def _other_key(rules: Rules, declared: Collection[str]) -> Node:
    """Return a key that is not in `declared`. The key has no escapes, so it cannot be another spelling of a declared
    name.
    """
    if not declared:
        return any_string(rules)
    taken = [name for name in declared if literal(name) == Literal(f'"{name}"')]
    return quoted(rules, _unlike(taken) if taken else repeat(PLAIN))


def _unlike(taken: list[str]) -> Node:
    """Return the rest of a key that differs from all of `taken`."""
    firsts = sorted({name[0] for name in taken if name})
    end: Node = NOTHING if "" in taken else EMPTY
    other = seq(minus(PLAIN, one_of("".join(firsts))), repeat(PLAIN))
    after = ((first, [name[1:] for name in taken if name.startswith(first)]) for first in firsts)
    return alt(end, other, *(seq(one_of(first), _unlike(names)) for first, names in after))


def _extra(schema: Schema) -> Any:
    """Return the schema of undeclared members (a schema, true or false), or None if `schema` does not give it."""
    found = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    return False if is_never(found) else found


def _declared(schema: Schema) -> dict[str, Any]:
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise GrammarError("properties must be an object")
    return dict(properties)


def _required(schema: Schema) -> list[str]:
    names = schema.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise GrammarError("required must be a list of names")
    return list(dict.fromkeys(names))


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error as error:
        raise GrammarError(f"patternProperties: {error}") from error
