"""Tests of grammars of JSON Schemas: every output is valid by an independent validator.

A schema that the grammar cannot enforce is refused.
"""

import json
import re
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.schema.convert import parse_exact_json, schema_grammar
from tests.grammar.checks import validator_of
from tests.grammar.schema.refusals import REFUSED
from tests.grammar.schema.samples import SAMPLES
from tests.grammar.walks import bytewise, demo, walk


def grammar(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


@pytest.mark.parametrize("name", SAMPLES)
def test_outputs_of_a_schema_grammar_are_valid(name: str) -> None:
    schema, _ = SAMPLES[name]
    validator = validator_of(schema)
    finished_count = 0
    for grammars, walks in ((demo(), 25), (bytewise(), 8)):
        for seed in range(walks):
            output = walk(grammars, grammars.matcher(grammar(schema)), seed, free_tokens=seed * 2)
            if output is not None:
                finished_count += 1
                value = json.loads(output.decode(), parse_float=Decimal)
                validator.validate(value)
    assert finished_count >= 15


@pytest.mark.parametrize("name", SAMPLES)
def test_schema_grammar_accepts_a_valid_value(name: str) -> None:
    schema, value = SAMPLES[name]
    validator_of(schema).validate(parse_exact_json(json.dumps(value)))
    json_texts = [json.dumps(value, ensure_ascii=False)]
    if not {"enum", "const"} & (schema.keys() if isinstance(schema, dict) else set()):
        json_texts.append(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
        json_texts += [json.dumps(value, ensure_ascii=False, indent=indent) for indent in (2, "\t")]
    for text in json_texts:
        assert demo().accepts(grammar(schema), text), text


def test_json_whitespace_is_bounded() -> None:
    object_grammar = grammar({"type": "object"})
    assert demo().accepts(object_grammar, '{\n  "a": 1\n}')
    for text in (
        '{\n\n"a": 1}',
        '{  "a": 1}',
        '{"a" : 1}',
        '{"a":  1}',
        '{"a": 1 , "b": 2}',
        "{\n" + " " * 17 + '"a": 1}',
    ):
        assert not demo().accepts(object_grammar, text), text


@pytest.mark.parametrize("name", SAMPLES)
def test_schema_grammar_accepts_no_invalid_value(name: str) -> None:
    schema = SAMPLES[name][0]
    validator = validator_of(schema)
    for candidate in (
        *(sample for _, sample in SAMPLES.values()),
        2,
        131,
        -6,
        0.1,
        "",
        "abcd",
        "2023-02-29",
        [1],
        [[1]],
        {},
        {"a": "x"},
    ):
        text = json.dumps(candidate, ensure_ascii=False)
        if demo().accepts(grammar(schema), text):
            assert validator.is_valid(parse_exact_json(text)), text


@pytest.mark.parametrize("name", REFUSED)
def test_schema_keyword_without_enforcement_is_refused_by_name(name: str) -> None:
    schema, message = REFUSED[name]
    with pytest.raises(GrammarError, match=re.escape(message)) as refusal:
        schema_grammar(parse_exact_json(json.dumps(schema)))
    assert len(str(refusal.value)) < 300


def test_bounded_strings_contain_no_control_characters() -> None:
    """xgrammar's own bounded strings may contain control characters, and then they are not JSON."""
    for bounds in ({"maxLength": 4}, {"minLength": 2}, {"maxLength": 200}, {"pattern": "^[\\s\\S]{3}$"}):
        for seed in range(20):
            schema = grammar({"type": "string", **bounds})
            output = walk(bytewise(), bytewise().matcher(schema), seed, free_tokens=3, max_tokens=40)
            assert output is not None and isinstance(json.loads(output), str)


def test_declared_key_cannot_be_escaped_repeated_or_reordered() -> None:
    schema = grammar({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": True})
    assert demo().accepts(schema, '{"a": null, "b": 1}')
    escaped = grammar({"type": "object", "properties": {'a"b': {"type": "null"}}, "additionalProperties": True})
    assert demo().accepts(escaped, '{"a\\"b": null, "c": 1}') and not demo().accepts(escaped, '{"a\\"b": 5}')
    for text in ('{"a": 1}', '{"\\u0061": 1}', '{"a": null, "a": 1}', '{"b": 1, "a": 1}'):
        assert not demo().accepts(schema, text)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "nullable": True}, ["a", None], [1]),  # OpenAPI 3.0
        ({"type": "string", "nullable": True, "enum": ["a", None]}, ["a", None], ["b"]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),  # draft 4
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": False}, [3], [2]),
        ({"type": "array", "items": [{"type": "null"}, {"const": 1}]}, [[None, 1]], [[None], [1], [None, 1, 2]]),
        ({"items": [{"type": "null"}, {"const": 1}], "minItems": 1}, [[None], [None, 1]], [[], [1], [None, 1, 2]]),
        ({"type": "array", "items": [{"type": "null"}], "additionalItems": {"const": 1}}, [[None, 1, 1]], [[None, 2]]),
        ({"type": "array", "items": {"type": "null"}, "additionalItems": False}, [[None, None]], [[1]]),
        ({"type": "string", "pattern": "\\.pdf$"}, ["a.pdf", ".pdf"], ["pdf", "a.pdfx"]),
        ({"type": "string", "pattern": "^(?!x)"}, ["", "ax"], ["xa"]),
        ({"type": "string", "pattern": "^a"}, ["a", 'a"\n'], ["", "ba"]),
        (
            {"properties": {"n1": {"minimum": 3}}, "patternProperties": {"^n": {"type": "integer"}}},
            [{"n1": 3}, {"n2": 1}, {"n1": 4, "n": 1}],
            [{"n1": 2}, {"n1": 3, "n1 ": None}],
        ),
        ({"type": "string", "pattern": "[ab]+"}, ["ab"], ["", "xa"]),  # neither ^ nor $: the whole string
    ],
)
def test_schema_forms_other_than_draft_2020_12_are_enforced(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    for value in valid + invalid:
        text = json.dumps(value, ensure_ascii=False)
        assert demo().accepts(grammar(schema), text) == (value in valid), text


def test_parse_exact_json_refuses_invalid_json() -> None:
    for text in ("", "{", "NaN", "{'a': 1}", '{"minimum": Infinity}'):
        with pytest.raises(GrammarError, match="not JSON"):
            parse_exact_json(text)


@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in ("enum", "const")])
def test_compact_json_has_no_whitespace_between_json_tokens(name: str) -> None:
    """`enum` and `const` are excluded: the schema writes out their values, which have one spelling only."""
    schema, sample = SAMPLES[name]
    compact_grammar = replace(grammar(schema), compact=True)
    assert demo().accepts(compact_grammar, json.dumps(sample, ensure_ascii=False, separators=(",", ":")))
    indented = json.dumps(sample, ensure_ascii=False, indent=1)
    if indented != json.dumps(sample, ensure_ascii=False, separators=(",", ":")):
        assert not demo().accepts(compact_grammar, indented) and demo().accepts(grammar(schema), indented)
