"""Converts each kind of grammar to xgrammar's own notation, with nothing in it that xgrammar would silently ignore."""

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import Literal, alt, automaton
from cluster.grammar.portable import PortableGrammar
from cluster.grammar.regex import parse
from cluster.grammar.schema.convert import loaded, object_grammar, schema_grammar

MAX_CHARACTERS = 256_000
MAX_SOURCE = 2_000_000  # characters of the converted grammar, all ASCII, which is sent to ranks
MAX_CHOICES = 10_000
ALIKE = 16
"""How many schemas have cached rules: a structural tag with several calls contains the schema of each tool twice."""
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
OF_CHAT: dict[str, frozenset[str]] = {
    "token": frozenset({"token"}),
    "json_schema": FORMATS["json_schema"] | {"compact"},
}


def tokens_of(tag: Any) -> list[int]:
    """Return the token ids that occur in a structural tag."""
    inner = tag.values() if isinstance(tag, dict) else tag if isinstance(tag, list) else ()
    own = [tag["token"]] if isinstance(tag, dict) and tag.get("type") == "token" else []
    return sorted({*own, *(token for part in inner for token in tokens_of(part))})


def portable(grammar: Grammar) -> PortableGrammar:
    """Return a grammar in the form that is sent to ranks.

    Raises:
        GrammarError: as `source`, or the rules are too long.
    """
    text = source(grammar)
    if len(text) > MAX_SOURCE:
        raise GrammarError(f"its rules have {len(text)} characters; at most {MAX_SOURCE} are allowed; make it shorter")
    if grammar.kind == "chat":
        return PortableGrammar(text, tag=True, tokens=tuple(tokens_of(json.loads(text))))
    return PortableGrammar(text, tag=grammar.kind == "structural_tag")


def source(grammar: Grammar) -> str:
    """Return the text that xgrammar compiles. For the kinds structural_tag and chat, it is a structural tag as JSON;
    for other kinds, rules in xgrammar's EBNF.

    Raises:
        GrammarError: the grammar is malformed, or uses something that is not enforced.
    """
    if len(grammar.text) > MAX_CHARACTERS:
        raise GrammarError(f"it has {len(grammar.text)} characters; at most {MAX_CHARACTERS} are allowed")
    try:
        grammar.text.encode()
        if grammar.kind == "json_object":
            return object_grammar(grammar.compact)
        if grammar.kind == "json_schema":
            return schema_grammar(loaded(grammar.text), grammar.compact)
        return SOURCES[grammar.kind](grammar.text)
    except UnicodeEncodeError as error:
        raise GrammarError("it holds half a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error


def _regex(text: str) -> str:
    return Rules().written(automaton(parse(text)))


def _choice(text: str) -> str:
    choices = loaded(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("must be a list of strings, and not an empty one")
    if len(choices) > MAX_CHOICES:
        raise GrammarError(f"has {len(choices)} choices; at most {MAX_CHOICES} are allowed")
    return Rules().written(alt(*map(Literal, choices)))


def _ebnf(text: str) -> str:
    bare = QUOTED.sub('""', text)
    if found := MACROS.search(bare):
        raise GrammarError(f"{found[1]} is not supported; write rules of text instead")
    if found := OPTIONS.search(bare):
        raise GrammarError(f"the rule option {found[1][:40]!r} is not supported; leave it out")
    return text


def _chat(text: str) -> str:
    return _structural_tag(text, FORMATS | OF_CHAT)


def _structural_tag(text: str, formats: Mapping[str, frozenset[str]] = FORMATS) -> str:
    tag = loaded(text)
    if not isinstance(tag, dict):
        raise GrammarError("must be an object")
    if "structures" in tag:
        tag = {"type": "structural_tag", "format": _of_structures(tag)}
    _only(tag, {"type", "format"}, "#")
    return json.dumps({"type": "structural_tag", "format": _format(tag.get("format"), "#/format", formats)})


def _of_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the older form of a structural tag to the newer one."""
    _only(tag, {"type", "structures", "triggers"}, "#")
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise GrammarError("structures and triggers must be lists")
    tags = []
    for at, structure in enumerate(structures):
        if not isinstance(structure, dict):
            raise GrammarError(f"#/structures/{at}: must be an object")
        _only(structure, {"begin", "schema", "end"}, f"#/structures/{at}")
        content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
        tags.append({"type": "tag", "begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _format(form: Any, path: str, formats: Mapping[str, frozenset[str]]) -> dict[str, Any]:
    """Return a format with the schemas and expressions inside it converted to EBNF."""
    if not isinstance(form, dict):
        raise GrammarError(f"{path}: a format must be an object")
    kind = form.get("type", "tag" if "begin" in form else None)
    if not isinstance(kind, str) or kind not in formats:
        raise GrammarError(f"{path}: the format {str(kind)[:40]!r} is not supported; known are {', '.join(formats)}")
    _only(form, formats[kind] | {"type"}, path)
    if kind in ("json_schema", "grammar", "regex"):
        return {"type": "grammar", "grammar": _inner(form, kind, path)}
    found: dict[str, Any] = {"type": kind}
    for name, value in form.items():
        if name in ("elements", "tags"):
            if not isinstance(value, list):
                raise GrammarError(f"{path}: {name} must be a list")
            found[name] = [_format(part, f"{path}/{name}/{at}", formats) for at, part in enumerate(value)]
        elif name == "content":
            found[name] = _format(value, f"{path}/content", formats)
        else:
            if not _is_text(value):
                raise GrammarError(f"{path}: {name} must be text; tokens are not supported")
            found[name] = value
    return found


def _is_text(value: Any) -> bool:
    return isinstance(value, str | bool | int) or (isinstance(value, list) and all(isinstance(x, str) for x in value))


def _inner(form: Mapping[str, Any], kind: str, path: str) -> str:
    if form.get("style", "json") != "json":
        raise GrammarError(f"{path}: the style {str(form['style'])[:40]!r} is not supported; only json is")
    inside = form.get({"json_schema": "json_schema", "grammar": "grammar", "regex": "pattern"}[kind])
    try:
        if kind == "json_schema":
            text = inside if isinstance(inside, str) else json.dumps(inside)
            return _rules_of_schema(text, form.get("compact") is True)
        if not isinstance(inside, str):
            raise GrammarError("must be text")
        return _regex(inside) if kind == "regex" else _ebnf(inside)
    except GrammarError as error:
        raise GrammarError(f"{path}: {error}") from error


@lru_cache(ALIKE)
def _rules_of_schema(text: str, compact: bool) -> str:
    return schema_grammar(loaded(text), compact)


def _only(found: Mapping[str, Any], known: set[str] | frozenset[str], path: str) -> None:
    for name in found:
        if name not in known:
            raise GrammarError(
                f"{path}: the field {name[:60]!r} is not supported; known are {', '.join(sorted(known))}"
            )


SOURCES: dict[str, Callable[[str], str]] = {
    "regex": _regex,
    "ebnf": _ebnf,
    "choice": _choice,
    "structural_tag": _structural_tag,
    "chat": _chat,
}
