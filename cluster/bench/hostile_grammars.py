"""Hostile grammars (very large, deeply nested, ambiguous, recursive or malformed), and the request fields for each."""

import json
from typing import Any

from cluster.grammar.asked import Grammar, GrammarKind
from cluster.grammar.sources import MAX_CHARACTERS


def _schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def _nested(opening: str, inner: str, closing: str, depth: int) -> str:
    return opening * depth + inner + closing * depth


def _doubling_rules(count: int, operator: str) -> str:
    """Return `count` rules and a last rule. Each of the `count` rules contains the next rule twice: as alternatives if
    `operator` is `|`, or in sequence if it is empty.
    """
    return (
        "\n".join(f"r{index} ::= r{index + 1} {operator} r{index + 1}" for index in range(count))
        + f'\nr{count} ::= "a"'
    )


KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf", "choice", "structural_tag")
MALFORMED = (
    "",
    "{",
    "\x00",
    "[[[",
    "null",
    '"',
    "a" * MAX_CHARACTERS,
    "a" * (MAX_CHARACTERS + 1),
    "\U0010ffff",
    "\ud800",
)
REGEXES = (
    "(a|b)*a(a|b){16}",
    "(((a{0,100}){0,100}){0,100}){0,100}",
    "([a-z]{1,20}){1,500}",
    "(a*)*b",
    "(a|a)*b",
    "(a?){50}a{50}",
    "(.*,){20}x",
    "[\\s\\S]{9999}",
    _nested("(", "a", ")", 5000),
    _nested("(", "a", ")*", 90),
    "|".join("abcdefgh" * 3 for _ in range(3000)),
    "|" * 50_000,
    "[" + "".join(chr(0x100 + 2 * i) for i in range(5000)) + "]{1,100}",
    "(x+x+)+y",
)
EBNF_GRAMMARS = (
    "root ::= root",
    "root ::= root root",
    'root ::= "a" root',
    'root ::= root root | "a" | ""',
    "root ::= s\ns ::= s s s | s s | [a-z]",
    "root ::= ([a-z]{1,20}){1,500}",
    "root ::= ((([a-z]{0,9}){0,9}){0,9}){0,9}",
    'root ::= "a"{1000000000}',
    "root ::= [a-z]{1,100000000}",
    "root ::= r0\n" + _doubling_rules(60, ""),
    "root ::= r0\n" + _doubling_rules(60, "|"),
    "root ::= " + _nested("(", '"a"', ")", 50_000),
    "root ::= " + _nested("(", '"a"', ")*", 900),
    "root ::= " + " ".join("[a-z]*" for _ in range(400)),
    "root ::= " + " | ".join(f'"{i}"' for i in range(15_000)),
    "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(9000)) + '\nr9000 ::= "a"',
    'root ::= Regex("(a|b)*a(a|b){18}")',
    'root ::= Regex("((((a{0,99}){0,99}){0,99}){0,99})")',
    'root ::= "a" x\nx ::= x "b"',
    "root ::= [^]*\n" * 3,
)
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    {"allOf": [{"$ref": "#"}, {"type": "object"}]},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 5},
    {"type": "string", "maxLength": 100_000},
    {"type": "string", "minLength": 100_000},
    {"type": "array", "minItems": 100_000},
    {"type": "object", "maxProperties": 9000, "properties": {"a": {}, "b": {}}},
    {"type": "integer", "minimum": -(10**99), "maximum": 10**99},
    {"type": "integer", "maximum": 10**4000},
    {"type": "integer", "multipleOf": 128},
    {"enum": [f"value {i}" for i in range(12_000)]},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}},
    {"type": "object", "properties": {f"p{i}": {} for i in range(400)}, "additionalProperties": True},
    {"type": "object", "properties": {"a" * 5000: {}}, "additionalProperties": True},
    {"type": "object", "patternProperties": {"(a+)+$": {}}, "properties": {"a" * 40 + "b": {}}},
    {"type": "string", "pattern": "^(\\w+\\s?)*$"},
    {"type": "string", "pattern": "(a|b)*a(a|b){18}"},
    {"anyOf": [{"properties": {f"a{i}": {}}} for i in range(900)]},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(300)]},
    {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(9)], "type": "integer"},
    {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}, "$ref": "#/$defs/d0"},
    {"const": json.loads(_nested("[", "1", "]", 150))},
)
HOSTILE = (
    *(Grammar(kind, text) for kind in KINDS for text in MALFORMED[:-1]),
    Grammar("regex", MALFORMED[-1]),
    *(Grammar("regex", text) for text in REGEXES),
    *(Grammar("ebnf", text) for text in EBNF_GRAMMARS),
    *map(_schema, SCHEMAS),
    Grammar("json_schema", _nested('{"items":', "{}", "}", 20_000)),
    Grammar("json_schema", _nested('{"items":', "{}", "}", 150)),
    Grammar("json_schema", _nested('{"anyOf":[', "{}", "]}", 200)),
    Grammar("json_schema", _nested("[", "1", "]", 100_000)),
    Grammar("choice", json.dumps(["x" * i for i in range(1, 400)])),
    Grammar("choice", json.dumps([f"{i}" for i in range(10_000)])),
    Grammar(
        "structural_tag",
        json.dumps({"type": "structural_tag", "format": {"type": "plus", "content": {"type": "any_text"}}}),
    ),
    Grammar(
        "structural_tag",
        '{"type":"structural_tag","format":'
        + _nested('{"type":"star","content":', '{"type":"any_text"}', "}", 300)
        + "}",
    ),
)


def hostile_request_fields(number: int) -> dict[str, Any]:
    """Return the request fields of hostile grammar `number`. Numbers beyond the list `HOSTILE` repeat it with
    variations, so that no cache has them. Choices that are not a JSON list, and schemas that are not a JSON object, do
    not vary. A varied structural tag is malformed, because text follows its JSON.
    """
    variation, index = divmod(number, len(HOSTILE))
    grammar = HOSTILE[index]
    suffix = f" {variation}" if variation else ""
    match grammar.kind:
        case "regex":
            return {"regex": grammar.text + suffix}
        case "ebnf":
            return {"ebnf": grammar.text + (f"\n#{suffix}" if suffix else "")}
        case "choice":
            choices = _json_or_text(grammar.text)
            extra = [suffix] if suffix else []
            return {"structured_outputs": {"choice": choices + extra if isinstance(choices, list) else choices}}
        case "structural_tag":
            return {"structural_tag": grammar.text + suffix}
        case _:
            schema = _json_or_text(grammar.text)
            return {"guided_json": {**schema, "title": suffix} if isinstance(schema, dict) and suffix else schema}


def _json_or_text(text: str) -> Any:
    """Return the value of a JSON text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
