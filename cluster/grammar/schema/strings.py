"""JSON strings as grammars: by length, pattern or format. The text between the quotes is always valid JSON."""

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from cluster.grammar.automata import Automaton, TooLargeError, intersection
from cluster.grammar.bounded import bounded_text
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import (
    MAX_AUTOMATON_STATES,
    NO_MATCH,
    Alt,
    Chars,
    Literal,
    Node,
    Regular,
    Repeat,
    Seq,
    Whitespace,
    alt,
    chars,
    chars_of,
    common_chars,
    fits_automaton,
    minus,
    repeat,
    seq,
)
from cluster.grammar.schema.keywords import Schema
from cluster.grammar.schema.stepwise import automaton_rules
from cluster.grammar.schema.texts import ANY_CHARACTER, strings_of_schema

MAX_INDENT = 16
# Nothing, one space, or a new line and an indent, as JSON writers do. The indent is bounded, so that a model cannot
# write white space forever.
SPACES = Whitespace(alt(Literal(""), Literal(" "), seq(Literal("\n"), repeat(chars_of(" \t"), 0, MAX_INDENT))))
HEX = chars((0x30, 0x39), (0x41, 0x46), (0x61, 0x66))
TO_ESCAPE = chars((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
UNESCAPED = minus(ANY_CHARACTER, TO_ESCAPE)
SHORT_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
ESCAPE = seq(Literal("\\"), alt(chars_of('"\\/bfnrt'), seq(Literal("u"), HEX, HEX, HEX, HEX)))  # all escapes of JSON
QUOTE = Literal('"')
AFTER_VALUE = seq(SPACES, chars_of(",}]:"))  # what follows a value (or a key) inside an object or an array
MAX_SMALL_COUNT = 8
MAX_SMALL_STATES = 150  # a state's mask takes a few milliseconds over a large vocabulary
COMMA = seq(Literal(","), SPACES)


def any_string(rules: Rules) -> Node:
    """Return the grammar of any JSON string."""
    return rules.add(Regular(seq(QUOTE, repeat(alt(UNESCAPED, ESCAPE)), QUOTE)), lookahead=AFTER_VALUE)


def string(rules: Rules, schema: Schema, excluded: Sequence[str] = ()) -> Node:
    """Return the grammar of the JSON strings that `minLength`, `maxLength`, `pattern`, `format` and `contentEncoding`
    allow, except the strings `excluded`.

    Raises:
        GrammarError: these keywords cannot be enforced.
    """
    content = strings_of_schema(schema, excluded)
    if content == repeat(ANY_CHARACTER):
        return any_string(rules)
    if not isinstance(content, Automaton):
        content = content if fits_automaton(content) else _small_automaton(content)
    return automaton_string(rules, content) if isinstance(content, Automaton) else quoted_string(rules, content)


def _small_automaton(node: Node) -> Node | Automaton:
    """Return the deterministic automaton of an expression if it is small, otherwise the expression. Call this for an
    expression that xgrammar cannot compile as one automaton. xgrammar precomputes the masks for the states of the
    returned automaton: over 150,000 tokens, a mask of base64 takes 0.05 ms, and 20 ms without that.
    """
    try:
        return intersection([node], MAX_SMALL_STATES) or node
    except TooLargeError:
        return node


def automaton_string(rules: Rules, automaton: Automaton) -> Node:
    """Return the grammar of the texts of an automaton, written as JSON strings. The rule of an accepting state also
    reads the closing quote.
    """

    def chars_node(characters: Chars) -> Node:
        return _escaped_node(characters, allow_counts=False)

    return rules.add(
        seq(QUOTE, automaton_rules(rules, automaton, chars_node, QUOTE, AFTER_VALUE)), lookahead=AFTER_VALUE
    )


def quoted_string(rules: Rules, content: Node) -> Node:
    """Return the grammar of the texts of `content`, written as JSON strings. If xgrammar compiles `content` as one
    automaton, the quotes are part of it. Otherwise xgrammar would have to examine, for each mask, the tokens that go
    beyond the end of the automaton.
    """
    match content:
        case Repeat(Chars() as characters, min_length, int() as max_length) if (
            max_length > MAX_SMALL_COUNT and min_length <= MAX_AUTOMATON_STATES
        ):
            return _bounded_string(rules, characters, min_length, max_length)
    if fits_automaton(content):
        return rules.add(Regular(seq(QUOTE, _escaped_node(content, allow_counts=True), QUOTE)), lookahead=AFTER_VALUE)
    return rules.add(seq(QUOTE, _escaped_node(content, allow_counts=False), QUOTE), lookahead=AFTER_VALUE)


def _bounded_string(rules: Rules, characters: Chars, min_length: int, max_length: int) -> Node:
    """Return the grammar of JSON strings of `min_length` to `max_length` characters of a class."""
    unescaped, escapes = minus(characters, TO_ESCAPE), _escape_sequences(common_chars(characters, TO_ESCAPE))
    character = alt(unescaped, escapes)
    alternatives = character.children if isinstance(character, Alt) else (character,)
    return rules.add(
        seq(QUOTE, bounded_text(rules, alternatives, QUOTE, min_length, max_length)), lookahead=AFTER_VALUE
    )


def _escaped_node(node: Node, allow_counts: bool) -> Node:
    """Return the grammar of the texts of `node` as JSON writes them between quotes. Only characters that must be
    escaped are escaped.

    If not `allow_counts`, the counted part of a repetition with a count above `MAX_SMALL_COUNT` leaves out the
    characters that must be escaped, because counts and escapes together are too slow in xgrammar.
    """
    match node:
        case Chars():
            return alt(minus(node, TO_ESCAPE), _escape_sequences(common_chars(node, TO_ESCAPE)))
        case Repeat(Chars() as child, min_count, max_count) if not allow_counts:
            unescaped, escapes = minus(child, TO_ESCAPE), _escape_sequences(common_chars(child, TO_ESCAPE))
            character = (
                unescaped
                if unescaped.ranges and max(min_count, max_count or 0) > MAX_SMALL_COUNT
                else alt(unescaped, escapes)
            )
            if max_count is not None or escapes == NO_MATCH:
                return repeat(character, min_count, max_count)
            return seq(
                repeat(character, min_count, min_count), repeat(unescaped), repeat(seq(escapes, repeat(unescaped)))
            )
        case Repeat(child, min_count, max_count):
            return repeat(_escaped_node(child, allow_counts), min_count, max_count)
        case Seq(children):
            return seq(*(_escaped_node(child, allow_counts) for child in children))
        case Alt(children):
            return alt(*(_escaped_node(child, allow_counts) for child in children))
        case Literal(text):
            return Literal(literal(text).text[1:-1])
        case _:
            return node


def _escape_sequences(characters: Chars) -> Node:
    code_points = [code for low, high in characters.ranges for code in range(low, high + 1)]
    short_letters = "".join(SHORT_ESCAPES[chr(code)] for code in code_points if chr(code) in SHORT_ESCAPES)
    hex_codes = [f"{code:02x}" for code in code_points if chr(code) not in SHORT_ESCAPES]
    hex_digits_of_ten = ((ten, "".join(digits[1] for digits in hex_codes if digits[0] == ten)) for ten in "01")
    return alt(
        seq(Literal("\\"), chars_of(short_letters)) if short_letters else NO_MATCH,
        *(seq(Literal(f"\\u00{ten}"), chars_of(last)) for ten, last in hex_digits_of_ten if last),
    )


def literal(value: Any) -> Literal:
    """Return the grammar of one JSON value in one spelling. A lone surrogate is escaped, as UTF-8 cannot hold it."""
    text = _json_text(value, ascii_only=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = _json_text(value, ascii_only=True)
    return Literal(text)


def _json_text(value: Any, ascii_only: bool) -> str:
    if isinstance(value, dict):
        members = (
            f"{_json_text(name, ascii_only)}: {_json_text(member, ascii_only)}" for name, member in value.items()
        )
        return "{" + ", ".join(members) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_json_text(member, ascii_only) for member in value) + "]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=ascii_only)
