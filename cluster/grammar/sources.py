"""Converts each kind of grammar to xgrammar's own notation, with nothing in it that xgrammar would silently ignore."""

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import Literal, alt, as_automaton
from cluster.grammar.portable import PortableGrammar
from cluster.grammar.regex import parse
from cluster.grammar.schema.convert import object_grammar, parse_exact_json, schema_grammar

MAX_CHARACTERS = 256_000
MAX_SOURCE = 2_000_000  # characters of the converted grammar, which is sent to ranks
MAX_CHOICES = 10_000
SCHEMA_CACHE_SIZE = 16
"""Number of schemas whose rules are cached. A structural tag that allows several calls may contain each tool's schema
twice.
"""
# Syntax that a client's EBNF may not use: token ids, automata that xgrammar builds wrongly, options that xgrammar does
# not enforce.
MACROS = re.compile(r"\b(Token|ExcludeToken|TokenTagDispatch|Regex)\s*\(")
OPTIONS = re.compile(r"^\s*[\w.-]+\s*\[(.*?)\]\s*::=", re.MULTILINE)
QUOTED = re.compile(r'#[^\n]*|"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\](?!\s*::=)')
# The formats of a structural tag that describe text, and their fields.
FORMATS: dict[str, frozenset[str]] = {
    "const_string": frozenset({"value"}),
    "json_schema": frozenset({"json_schema", "style"}),
    "any_text": frozenset({"excludes"}),
    "grammar": frozenset({"grammar"}),
    "regex": frozenset({"pattern"}),
    "sequence": frozenset({"elements"}),
    "or": frozenset({"elements"}),
    "tag": frozenset({"begin", "content", "end"}),
    "triggered_tags": frozenset({"triggers", "tags", "at_least_one", "stop_after_first", "excludes"}),
    "tags_with_separator": frozenset({"tags", "separator", "at_least_one", "stop_after_first"}),
    "optional": frozenset({"content"}),
    "plus": frozenset({"content"}),
    "star": frozenset({"content"}),
    "repeat": frozenset({"min", "max", "content"}),
}


# Further formats and fields, allowed only in a structural tag of the kind chat, which this server writes.
CHAT_FORMATS: dict[str, frozenset[str]] = {
    "token": frozenset({"token"}),
    "json_schema": FORMATS["json_schema"] | {"compact"},
}


def token_ids_of(tag: Any) -> list[int]:
    """Return the token ids that occur in a structural tag."""
    inner_values = tag.values() if isinstance(tag, dict) else tag if isinstance(tag, list) else ()
    own_ids = [tag["token"]] if isinstance(tag, dict) and tag.get("type") == "token" else []
    return sorted({*own_ids, *(token for inner_value in inner_values for token in token_ids_of(inner_value))})


def to_portable(grammar: Grammar) -> PortableGrammar:
    """Return a grammar in the form that is sent to ranks.

    Raises:
        GrammarError: as `xgrammar_source`, or the rules are too long.
    """
    text = xgrammar_source(grammar)
    if len(text) > MAX_SOURCE:
        raise GrammarError(f"its rules have {len(text)} characters; at most {MAX_SOURCE} are allowed; make it shorter")
    if grammar.kind == "chat":
        return PortableGrammar(text, is_structural_tag=True, special_token_ids=tuple(token_ids_of(json.loads(text))))
    return PortableGrammar(text, is_structural_tag=grammar.kind == "structural_tag")


def xgrammar_source(grammar: Grammar) -> str:
    """Return the text that xgrammar compiles. For the kinds structural_tag and chat, it is a structural tag as JSON;
    for other kinds, rules in xgrammar's EBNF.

    Raises:
        GrammarError: the grammar is malformed or too long, or uses syntax or a keyword that is not enforced.
    """
    if len(grammar.text) > MAX_CHARACTERS:
        raise GrammarError(f"it has {len(grammar.text)} characters; at most {MAX_CHARACTERS} are allowed")
    try:
        grammar.text.encode()
        if grammar.kind == "json_object":
            return object_grammar(grammar.compact)
        if grammar.kind == "json_schema":
            return schema_grammar(parse_exact_json(grammar.text), grammar.compact)
        return CONVERTERS[grammar.kind](grammar.text)
    except UnicodeEncodeError as error:
        raise GrammarError("it holds half a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error


def _convert_regex(text: str) -> str:
    return Rules().to_ebnf(as_automaton(parse(text)))


def _convert_choice(text: str) -> str:
    choices = parse_exact_json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("must be a list of strings, and not an empty one")
    if len(choices) > MAX_CHOICES:
        raise GrammarError(f"has {len(choices)} choices; at most {MAX_CHOICES} are allowed")
    return Rules().to_ebnf(alt(*map(Literal, choices)))


def _check_ebnf(text: str) -> str:
    without_quoted = QUOTED.sub('""', text)
    if match := MACROS.search(without_quoted):
        raise GrammarError(f"{match[1]} is not supported; write rules of text instead")
    if match := OPTIONS.search(without_quoted):
        raise GrammarError(f"the rule option {match[1][:40]!r} is not supported; leave it out")
    return text


def _convert_chat(text: str) -> str:
    return _convert_structural_tag(text, FORMATS | CHAT_FORMATS)


def _convert_structural_tag(text: str, formats: Mapping[str, frozenset[str]] = FORMATS) -> str:
    tag = parse_exact_json(text)
    if not isinstance(tag, dict):
        raise GrammarError("must be an object")
    if "structures" in tag:
        tag = {"type": "structural_tag", "format": _convert_structures(tag)}
    _check_fields(tag, {"type", "format"}, "#")
    return json.dumps({"type": "structural_tag", "format": _convert_format(tag.get("format"), "#/format", formats)})


def _convert_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the older form of a structural tag to the newer one."""
    _check_fields(tag, {"type", "structures", "triggers"}, "#")
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise GrammarError("structures and triggers must be lists")
    tags = []
    for index, structure in enumerate(structures):
        if not isinstance(structure, dict):
            raise GrammarError(f"#/structures/{index}: must be an object")
        _check_fields(structure, {"begin", "schema", "end"}, f"#/structures/{index}")
        content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
        tags.append({"type": "tag", "begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _convert_format(tag_format: Any, path: str, formats: Mapping[str, frozenset[str]]) -> dict[str, Any]:
    """Return a format with the schemas and expressions inside it converted to EBNF."""
    if not isinstance(tag_format, dict):
        raise GrammarError(f"{path}: a format must be an object")
    kind = tag_format.get("type", "tag" if "begin" in tag_format else None)
    if not isinstance(kind, str) or kind not in formats:
        raise GrammarError(f"{path}: the format {str(kind)[:40]!r} is not supported; known are {', '.join(formats)}")
    _check_fields(tag_format, formats[kind] | {"type"}, path)
    if kind in ("json_schema", "grammar", "regex"):
        return {"type": "grammar", "grammar": _convert_inner(tag_format, kind, path)}
    converted: dict[str, Any] = {"type": kind}
    for name, value in tag_format.items():
        if name in ("elements", "tags"):
            if not isinstance(value, list):
                raise GrammarError(f"{path}: {name} must be a list")
            converted[name] = [
                _convert_format(inner_format, f"{path}/{name}/{index}", formats)
                for index, inner_format in enumerate(value)
            ]
        elif name == "content":
            converted[name] = _convert_format(value, f"{path}/content", formats)
        else:
            if not _is_text(value):
                raise GrammarError(f"{path}: {name} must be text; tokens are not supported")
            converted[name] = value
    return converted


def _is_text(value: Any) -> bool:
    return isinstance(value, str | bool | int) or (isinstance(value, list) and all(isinstance(x, str) for x in value))


def _convert_inner(tag_format: Mapping[str, Any], kind: str, path: str) -> str:
    if tag_format.get("style", "json") != "json":
        raise GrammarError(f"{path}: the style {str(tag_format['style'])[:40]!r} is not supported; only json is")
    content = tag_format.get({"json_schema": "json_schema", "grammar": "grammar", "regex": "pattern"}[kind])
    try:
        if kind == "json_schema":
            text = content if isinstance(content, str) else json.dumps(content)
            return _rules_of_schema(text, tag_format.get("compact") is True)
        if not isinstance(content, str):
            raise GrammarError("must be text")
        return _convert_regex(content) if kind == "regex" else _check_ebnf(content)
    except GrammarError as error:
        raise GrammarError(f"{path}: {error}") from error


@lru_cache(SCHEMA_CACHE_SIZE)
def _rules_of_schema(text: str, compact: bool) -> str:
    return schema_grammar(parse_exact_json(text), compact)


def _check_fields(fields: Mapping[str, Any], known: set[str] | frozenset[str], path: str) -> None:
    for name in fields:
        if name not in known:
            raise GrammarError(
                f"{path}: the field {name[:60]!r} is not supported; known are {', '.join(sorted(known))}"
            )


CONVERTERS: dict[str, Callable[[str], str]] = {
    "regex": _convert_regex,
    "ebnf": _check_ebnf,
    "choice": _convert_choice,
    "structural_tag": _convert_structural_tag,
    "chat": _convert_chat,
}
