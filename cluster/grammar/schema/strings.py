"""JSON strings as grammars: by length, pattern or format. The text between the quotes is always valid JSON."""

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from cluster.grammar.automata import Automaton, TooLargeError, intersection
from cluster.grammar.bounded import bounded_text
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import (
    MOST_STATES,
    NOTHING,
    Alt,
    Blank,
    Chars,
    Literal,
    Node,
    Regular,
    Repeat,
    Seq,
    alt,
    both,
    chars,
    fits_automaton,
    minus,
    one_of,
    repeat,
    seq,
)
from cluster.grammar.schema.keywords import Schema
from cluster.grammar.schema.stepwise import rules_of
from cluster.grammar.schema.texts import ALL, text_of_schema

INDENT = 16
# Nothing, one space, or a new line and an indent, as JSON writers do. The indent is bounded, so that a model cannot
# write white space forever.
SPACES = Blank(alt(Literal(""), Literal(" "), seq(Literal("\n"), repeat(one_of(" \t"), 0, INDENT))))
HEX = chars((0x30, 0x39), (0x41, 0x46), (0x61, 0x66))
TO_ESCAPE = chars((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
PLAIN = minus(ALL, TO_ESCAPE)
SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
ESCAPE = seq(Literal("\\"), alt(one_of('"\\/bfnrt'), seq(Literal("u"), HEX, HEX, HEX, HEX)))  # all escapes of JSON
QUOTE = Literal('"')
AFTER = seq(SPACES, one_of(",}]:"))  # what follows a value inside another one
FEW = 8
SMALL = 150  # states of a small automaton; a state's mask takes a few milliseconds over a large vocabulary
COMMA = seq(Literal(","), SPACES)


def any_string(rules: Rules) -> Node:
    """Return any JSON string."""
    return rules.add(Regular(seq(QUOTE, repeat(alt(PLAIN, ESCAPE)), QUOTE)), before=AFTER)


def string(rules: Rules, schema: Schema, excluded: Sequence[str] = ()) -> Node:
    """Return a JSON string by `minLength`, `maxLength`, `pattern`, `format` and `contentEncoding`, without `excluded`.

    Raises:
        GrammarError: these keywords cannot be enforced.
    """
    found = text_of_schema(schema, excluded)
    if found == repeat(ALL):
        return any_string(rules)
    if not isinstance(found, Automaton):
        found = found if fits_automaton(found) else _if_small(found)
    return stepwise(rules, found) if isinstance(found, Automaton) else quoted(rules, found)


def _if_small(node: Node) -> Node | Automaton:
    """Return our automaton of an expression if it is small, otherwise the expression. Use this for expressions that do
    not fit xgrammar's automata: the masks of our automaton's states are precomputed. A mask of base64 took 20 ms over
    150,000 tokens, now 0.05 ms.
    """
    try:
        return intersection([node], SMALL) or node
    except TooLargeError:
        return node


def stepwise(rules: Rules, automaton: Automaton) -> Node:
    """Return the texts of an automaton as JSON strings. The rule of an accepting state also reads the closing quote."""

    def written(characters: Chars) -> Node:
        return _in_json(characters, counted=False)

    return rules.add(seq(QUOTE, rules_of(rules, automaton, written, QUOTE, AFTER)), before=AFTER)


def quoted(rules: Rules, inside: Node) -> Node:
    """Return the texts of `inside` as JSON strings. The quotes are part of the automaton, because otherwise each mask
    would have to examine the tokens that go beyond the automaton's end.
    """
    match inside:
        case Repeat(Chars() as part, least, int() as most) if most > FEW and least <= MOST_STATES:
            return _counted(rules, part, least, most)
    if fits_automaton(inside):
        return rules.add(Regular(seq(QUOTE, _in_json(inside, counted=True), QUOTE)), before=AFTER)
    return rules.add(seq(QUOTE, _in_json(inside, counted=False), QUOTE), before=AFTER)


def _counted(rules: Rules, part: Chars, least: int, most: int) -> Node:
    """Return a JSON string of `least` to `most` characters of a class."""
    plain, escapes = minus(part, TO_ESCAPE), _escapes(both(part, TO_ESCAPE))
    one = alt(plain, escapes)
    parts = one.parts if isinstance(one, Alt) else (one,)
    return rules.add(seq(QUOTE, bounded_text(rules, parts, QUOTE, least, most)), before=AFTER)


def _in_json(node: Node, counted: bool) -> Node:
    """Return how JSON writes the texts of `node` between quotes. Only characters that must be escaped are escaped.

    If not `counted`, a repetition with a count above `FEW` leaves out the characters that must be escaped, because
    counts and escapes together are too slow in xgrammar.
    """
    match node:
        case Chars():
            return alt(minus(node, TO_ESCAPE), _escapes(both(node, TO_ESCAPE)))
        case Repeat(Chars() as part, least, most) if not counted:
            plain, escapes = minus(part, TO_ESCAPE), _escapes(both(part, TO_ESCAPE))
            one = plain if plain.ranges and max(least, most or 0) > FEW else alt(plain, escapes)
            if most is not None or escapes == NOTHING:
                return repeat(one, least, most)
            return seq(repeat(one, least, least), repeat(plain), repeat(seq(escapes, repeat(plain))))
        case Repeat(part, least, most):
            return repeat(_in_json(part, counted), least, most)
        case Seq(parts):
            return seq(*(_in_json(part, counted) for part in parts))
        case Alt(parts):
            return alt(*(_in_json(part, counted) for part in parts))
        case Literal(text):
            return Literal(literal(text).text[1:-1])
        case _:
            return node


def _escapes(characters: Chars) -> Node:
    codes = [code for low, high in characters.ranges for code in range(low, high + 1)]
    short = "".join(SHORT[chr(code)] for code in codes if chr(code) in SHORT)
    longer = [f"{code:02x}" for code in codes if chr(code) not in SHORT]
    long = ((ten, "".join(digits[1] for digits in longer if digits[0] == ten)) for ten in "01")
    return alt(
        seq(Literal("\\"), one_of(short)) if short else NOTHING,
        *(seq(Literal(f"\\u00{ten}"), one_of(last)) for ten, last in long if last),
    )


def literal(value: Any) -> Literal:
    """Return one JSON value, in one spelling. A lone surrogate is escaped, because UTF-8 cannot hold it."""
    text = _spelled(value, ascii_only=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = _spelled(value, ascii_only=True)
    return Literal(text)


def _spelled(value: Any, ascii_only: bool) -> str:
    if isinstance(value, dict):
        members = (f"{_spelled(name, ascii_only)}: {_spelled(part, ascii_only)}" for name, part in value.items())
        return "{" + ", ".join(members) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_spelled(part, ascii_only) for part in value) + "]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=ascii_only)
