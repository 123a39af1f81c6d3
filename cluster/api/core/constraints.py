"""Reads the output constraint of a request: OpenAI's response_format, and the fields of vLLM and SGLang."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from cluster.api.core.errors import ApiError, shown
from cluster.grammar.asked import Grammar, GrammarError, Kind

# The keys of vLLM's structured_outputs. FIELDS has the fields at the top level: vLLM's older ones, and SGLang's.
STRUCTURED: dict[str, Kind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
NAMES = ("response_format", "structured_outputs")
FIELDS: dict[str, Kind] = {
    "guided_json": "json_schema",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
}
# Options of structured_outputs. COMPACT is honoured; OPTIONS must be false or absent.
COMPACT = "disable_any_whitespace"
OPTIONS = ("disable_fallback", "disable_additional_properties", "whitespace_pattern")
TYPES = ("text", "json_object", "json_schema", "structural_tag")


class OutputConstraint(NamedTuple):
    """A grammar, and the path of the field that requests it."""

    field: str
    grammar: Grammar


def constraint_of(body: Mapping[str, Any]) -> OutputConstraint | None:
    """Return the output constraint that a body requests, or None if the body requests no constraint.

    Raises:
        ApiError: 400 for a malformed field, or for two fields that each request a constraint; the error names both.
    """
    found = [*_response_format(body.get("response_format")), *_structured(body.get("structured_outputs"))]
    found += [
        OutputConstraint(name, grammar)
        for name, kind in FIELDS.items()
        if (grammar := _read(name, kind, body.get(name)))
    ]
    if len(found) > 1:
        one, two = found[0].field, found[1].field
        message = f"{two}: {one} asks for a form of the output too; send one of them"
        raise ApiError(message, param=two, code="invalid_value")
    return found[0] if found else None


def refused(error: GrammarError, field: str) -> ApiError:
    """Return the 400 for a grammar that is not supported. `field` is the field that requested the grammar."""
    return ApiError(f"{field}: {error}", param=field, code="invalid_value")


def _response_format(value: Any) -> list[OutputConstraint]:
    if value is None:
        return []
    name = "response_format"
    if not isinstance(value, dict):
        raise _wrong_type(name, "an object", value)
    kind = value.get("type")
    if kind not in TYPES:
        raise _wrong(f"{name}.type", f"must be one of {', '.join(TYPES)}, got {shown(kind)}")
    if kind == "structural_tag":
        return [OutputConstraint(name, Grammar("structural_tag", json.dumps(value)))]
    beside = {"json_schema": ("json_schema",), "json_object": ("schema",)}.get(kind, ())
    _only(name, value, ("type", *beside))
    if kind == "json_object":
        schema = _read(f"{name}.schema", "json_schema", value.get("schema"))
        return [
            OutputConstraint(name, Grammar("json_object"))
            if schema is None
            else OutputConstraint(f"{name}.schema", schema)
        ]
    return [_named_schema(f"{name}.json_schema", value.get("json_schema"))] if kind == "json_schema" else []


def _named_schema(name: str, value: Any) -> OutputConstraint:
    """Read OpenAI's named JSON schema. The schema is enforced even with `strict: false`."""
    if not isinstance(value, dict):
        raise _wrong_type(name, "an object", value)
    _only(name, value, ("name", "description", "schema", "strict"))
    for part, kind in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(value.get(part), kind | None):
            raise _wrong_type(f"{name}.{part}", "a string" if kind is str else "true or false", value[part])
    grammar = _read(f"{name}.schema", "json_schema", value.get("schema"))
    if grammar is None:
        raise ApiError(f"{name}.schema: required", param=f"{name}.schema", code="missing_required_parameter")
    return OutputConstraint(f"{name}.schema", grammar)


def _structured(value: Any) -> list[OutputConstraint]:
    if value is None:
        return []
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise _wrong_type(name, "an object", value)
    _only(name, value, (*STRUCTURED, *OPTIONS, COMPACT))
    compact = value.get(COMPACT) or False
    if not isinstance(compact, bool):
        raise _wrong_type(f"{name}.{COMPACT}", "true or false", compact)
    for option in OPTIONS:
        if value.get(option) not in (None, False):
            raise _wrong(f"{name}.{option}", f"{shown(value[option])} is not supported by this server; leave it out")
    fields = ((f"{name}.{part}", _read(f"{name}.{part}", kind, value.get(part))) for part, kind in STRUCTURED.items())
    return [
        OutputConstraint(field, replace(grammar, compact=compact)) for field, grammar in fields if grammar is not None
    ]


def _read(name: str, kind: Kind, value: Any) -> Grammar | None:
    """Return the grammar in one field, or None if the field requests no grammar."""
    if value is None:
        return None
    if kind == "json_object":
        if not isinstance(value, bool):
            raise _wrong_type(name, "true or false", value)
        return Grammar(kind) if value else None
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
            raise _wrong_type(name, "a list of strings", value)
        return Grammar(kind, json.dumps(value)) if value else None
    if isinstance(value, str):
        return Grammar(kind, value)
    if kind == "json_schema" and isinstance(value, dict | bool):
        return Grammar(kind, json.dumps(value))
    if kind == "structural_tag" and isinstance(value, dict):
        return Grammar(kind, json.dumps(value))
    raise _wrong_type(name, "a string" if kind in ("regex", "ebnf") else "an object, or its JSON as a string", value)


def _only(name: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for part in value:
        if part not in known:
            raise _wrong(f"{name}.{part[:60]}", f"unknown field; known are {', '.join(known)}")


def _wrong(name: str, message: str) -> ApiError:
    return ApiError(f"{name}: {message}", param=name, code="invalid_value")


def _wrong_type(name: str, expected: str, value: Any) -> ApiError:
    return ApiError(f"{name}: must be {expected}, got {shown(value)}", param=name, code="invalid_type")
