"""Grammars that are not schemas: EBNF rules, choices and structural tags, and their features that are not supported."""

import json
import re
from typing import Any

import pytest

from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.sources import MAX_CHARACTERS, xgrammar_source
from tests.grammar.walks import demo, walk

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"]}
CALLS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}
RULES = [
    'root ::= "a"',
    'root ::= item ("," item)*\nitem ::= [0-9]+ | "(" root ")"',
    'root ::= "Token(3)" [Token(] # Token(4)\n',
    'root ::= [a-c]{2} | TagDispatch(("<x>", x))\nx ::= "y"',
    'root ::= (yes | no) "."\nyes ::= "yes"\nno ::= "no"',
]


def tag(form: Any) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


@pytest.mark.parametrize("rules", RULES)
def test_ebnf_rules_generate_complete_outputs(rules: str) -> None:
    assert walk(demo(), demo().matcher(Grammar("ebnf", rules)), 1, free_tokens=5) is not None


def test_choice_grammar_accepts_exactly_its_choices() -> None:
    choices = ["yes", "no", 'a "b" \\ c\n', "é€", "yesno"]
    grammar = Grammar("choice", json.dumps(choices))
    assert all(demo().accepts(grammar, choice) for choice in choices)
    assert not any(demo().accepts(grammar, text) for text in ("", "y", "noo", "yes ", 'a "b'))
    assert {walk(demo(), demo().matcher(grammar), seed) for seed in range(30)} <= {text.encode() for text in choices}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("structural_tag", json.dumps(CALLS)),
        tag(
            {
                "type": "triggered_tags",
                "triggers": ["<f="],
                "tags": [
                    {"begin": "<f=a>", "end": "</f>", "content": {"type": "json_schema", "json_schema": SCHEMA}},
                ],
            }
        ),
    ],
)
def test_structural_tags_constrain_calls_within_free_text(grammar: Grammar) -> None:
    accepted_texts = ["", "some text", 'x<f=a>{"city": "Rome"}</f> y', '<f=a>{"city": ""}</f><f=a>{"city": "a"}</f>']
    refused_texts = [
        "<f=b>",
        '<f=a>{"city": 1}</f>',
        '<f=a>{"city": "Paris"}</f>',
        '<f=a>{"city": "a\tb"}</f>',
        "<f=a>{}</f>",
    ]
    assert [demo().accepts(grammar, text) for text in accepted_texts] == [True] * len(accepted_texts)
    assert [demo().accepts(grammar, text) for text in refused_texts] == [False] * len(refused_texts)


def test_nested_structural_tag_formats_are_enforced() -> None:
    number = {"type": "json_schema", "json_schema": '{"type": "integer", "maximum": 12, "minimum": 10}'}
    grammar = tag(
        {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "a"},
                {"type": "or", "elements": [number, {"type": "regex", "pattern": "x{2}"}]},
                {"type": "optional", "content": {"type": "grammar", "grammar": 'root ::= "!" | "?"'}},
            ],
        }
    )
    for text, is_accepted in (
        ("a10", True),
        ("axx!", True),
        ("a12?", True),
        ("a13", False),
        ("ax", False),
        ("a10!!", False),
    ):
        assert demo().accepts(grammar, text) == is_accepted, text


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("ebnf", "root ::= Token(3)"), "Token is not supported"),
        (Grammar("ebnf", "root ::= x\nx ::= ExcludeToken (3)"), "ExcludeToken"),
        (Grammar("ebnf", "root ::= TokenTagDispatch((3, x))\nx ::= [a]"), "TokenTagDispatch"),
        (Grammar("ebnf", 'root ::= Regex("(?:ab*)?")'), "Regex is not supported"),
        (Grammar("ebnf", "root ::= x\nx[max_chars=3] ::= [a-z]*"), "max_chars"),
        (Grammar("ebnf", 'root[capture="Token"] ::= "a"'), "capture"),
        (Grammar("ebnf", "root ::= [a]" + " " * MAX_CHARACTERS), "characters"),
        (Grammar("ebnf", 'root ::= "\ud800"'), "surrogate"),
        (Grammar("choice", "[]"), "list of strings"),
        (Grammar("choice", '"a"'), "list of strings"),
        (Grammar("choice", '["a", 1]'), "list of strings"),
        (Grammar("choice", json.dumps(["a"] * 10_001)), "10001 choices"),
        (Grammar("structural_tag", "[]"), "must be an object"),
        (Grammar("structural_tag", "{"), "not JSON"),
        (tag({"type": "token", "token": 3}), "'token' is not supported"),
        (tag({"type": "any_tokens"}), "'any_tokens' is not supported"),
        (tag({"type": "any_text", "max_chars": 3}), "'max_chars'"),
        (tag({"type": "tag", "begin": {"token": 1}, "content": {"type": "any_text"}, "end": ""}), "begin"),
        (tag({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}), "qwen_xml"),
        (tag({"type": "json_schema", "json_schema": {"contains": {}}}), "'contains'"),
        (tag({"type": "sequence", "elements": [{"type": "regex", "pattern": "(?=a)"}]}), "#/format/elements/0"),
        (tag({"type": "grammar", "grammar": "root ::= Token(1)"}), "Token"),
        (tag(None), "must be an object"),
        (Grammar("structural_tag", json.dumps({**CALLS, "stop": 1})), "'stop'"),
        (Grammar("json_schema", '{"items":' * 20_000 + "{}" + "}" * 20_000), "deeply"),
    ],
)  # fmt: skip
def test_unsupported_grammar_feature_is_refused_by_name(grammar: Grammar, reason: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(reason)) as captured_error:
        xgrammar_source(grammar)
    assert len(str(captured_error.value)) < 400


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("ebnf", "root ::= rest"), '"rest" is not defined'),
        (Grammar("ebnf", 'start ::= "a"'), "root"),
        (Grammar("ebnf", 'root ::= "a'), "at line 1"),
        (Grammar("ebnf", "root ::= root"), "nothing can match"),
        (Grammar("ebnf", 'root ::= "a" x\nx ::= x "b"'), "dead end"),
        (Grammar("ebnf", "root ::= s\ns ::= s s s | s s | [a-z]"), "too ambiguous"),
        (tag({"type": "tag", "begin": "<f>", "content": {"type": "any_text"}, "end": ""}), "end string"),
    ],
)  # fmt: skip
def test_xgrammar_error_becomes_a_grammar_error(grammar: Grammar, reason: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(reason)) as captured_error:
        demo().worker.compile(grammar)
    assert ".cc:" not in str(captured_error.value) and "\n" not in str(captured_error.value)
