"""The request fields of three APIs that constrain the output. Each field gives one grammar; two fields are refused."""

import json
from typing import Any

import pytest

from cluster.api.core.constraints import TOP_LEVEL_KINDS, constraint_of
from cluster.api.core.errors import ApiError, invalid_value
from cluster.grammar.asked import Grammar, GrammarError

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
OF_FORMAT = "response_format.json_schema"


def form(**members: Any) -> dict[str, Any]:
    """OpenAI's `response_format` field for a schema, with these members of `json_schema`."""
    return {"response_format": {"type": "json_schema", "json_schema": members}}


def vllm(**members: Any) -> dict[str, Any]:
    return {"structured_outputs": members}


CONSTRAINT_CASES: dict[str, tuple[dict[str, Any], str, Grammar]] = {
    "openai object": ({"response_format": {"type": "json_object"}}, "response_format", Grammar("json_object")),
    "openai schema": ({"response_format": FORMAT}, f"{OF_FORMAT}.schema", Grammar("json_schema", TEXT)),
    "openai schema as text": (form(schema=TEXT), f"{OF_FORMAT}.schema", Grammar("json_schema", TEXT)),
    "structural tag": ({"response_format": TAG}, "response_format", Grammar("structural_tag", json.dumps(TAG))),
    "together schema": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        "response_format.schema",
        Grammar("json_schema", TEXT),
    ),
    "vllm json": (vllm(json=SCHEMA), "structured_outputs.json", Grammar("json_schema", TEXT)),
    "vllm object": (vllm(json_object=True), "structured_outputs.json_object", Grammar("json_object")),
    "vllm regex": (vllm(regex="a+"), "structured_outputs.regex", Grammar("regex", "a+")),
    "vllm choice": (vllm(choice=["a", "b"]), "structured_outputs.choice", Grammar("choice", '["a", "b"]')),
    "vllm grammar": (vllm(grammar="[a]", json=None), "structured_outputs.grammar", Grammar("ebnf", "[a]")),
    "vllm tag": (
        vllm(structural_tag=TAG),
        "structured_outputs.structural_tag",
        Grammar("structural_tag", json.dumps(TAG)),
    ),
    "guided json": ({"guided_json": TEXT}, "guided_json", Grammar("json_schema", TEXT)),
    "guided json as a value": ({"guided_json": True}, "guided_json", Grammar("json_schema", "true")),
    "guided object": ({"guided_json_object": True}, "guided_json_object", Grammar("json_object")),
    "guided regex": ({"guided_regex": ""}, "guided_regex", Grammar("regex", "")),
    "guided choice": ({"guided_choice": ["x"]}, "guided_choice", Grammar("choice", '["x"]')),
    "guided grammar": ({"guided_grammar": "g"}, "guided_grammar", Grammar("ebnf", "g")),
    "sglang schema": ({"json_schema": TEXT}, "json_schema", Grammar("json_schema", TEXT)),
    "sglang regex": ({"regex": "a"}, "regex", Grammar("regex", "a")),
    "sglang ebnf": ({"ebnf": "e"}, "ebnf", Grammar("ebnf", "e")),
    "sglang tag": ({"structural_tag": json.dumps(TAG)}, "structural_tag", Grammar("structural_tag", json.dumps(TAG))),
    "sglang regex and text": ({"response_format": {"type": "text"}, "regex": "a"}, "regex", Grammar("regex", "a")),
}


@pytest.mark.parametrize("name", CONSTRAINT_CASES)
def test_constraint_of_reads_every_output_format_field(name: str) -> None:
    body, field, grammar = CONSTRAINT_CASES[name]
    found = constraint_of({"model": "m", "messages": [], **body})
    assert found is not None and found.grammar == grammar
    assert constraint_of(body) == (field, grammar)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"model": "m"},
        dict.fromkeys(["response_format", "structured_outputs", *TOP_LEVEL_KINDS]),
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False, "choice": [], "disable_fallback": False}},
        {"guided_choice": [], "guided_json_object": False},
    ],
)
def test_constraint_of_returns_none_for_empty_or_text_formats(body: dict[str, Any]) -> None:
    assert constraint_of(body) is None


@pytest.mark.parametrize(
    ("body", "field", "reason", "code"),
    [
        ({"response_format": "json"}, "response_format", "an object", "invalid_type"),
        ({"response_format": {}}, "response_format.type", "one of text, json_object", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "got 'xml'", "invalid_value"),
        ({"response_format": {"type": []}}, "response_format.type", "got []", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, OF_FORMAT, "an object", "invalid_type"),
        (form(name="x"), f"{OF_FORMAT}.schema", "required", "missing_required_parameter"),
        (form(schema=3), f"{OF_FORMAT}.schema", "an object", "invalid_type"),
        (form(schema={}, strict=1), f"{OF_FORMAT}.strict", "true or false", "invalid_type"),
        (form(schema={}, x=1), f"{OF_FORMAT}.x", "unknown field", "invalid_value"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, OF_FORMAT, "unknown field", "invalid_value"),
        ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema", "an obj", "invalid_type"),
        ({"structured_outputs": []}, "structured_outputs", "an object", "invalid_type"),
        (vllm(xml=1), "structured_outputs.xml", "unknown field", "invalid_value"),
        (vllm(regex=1), "structured_outputs.regex", "a string", "invalid_type"),
        (vllm(json={}, whitespace_pattern=" "), "structured_outputs.whitespace_pattern", "not sup", "invalid_value"),
        (vllm(json_object=1), "structured_outputs.json_object", "true or false", "invalid_type"),
        ({"guided_choice": ["a", 1]}, "guided_choice", "a list of strings", "invalid_type"),
        ({"guided_json": [1]}, "guided_json", "an object", "invalid_type"),
        ({"ebnf": {}}, "ebnf", "a string", "invalid_type"),
        ({"structural_tag": 1}, "structural_tag", "an object", "invalid_type"),
    ],
)
def test_malformed_format_fields_are_refused_by_name(body: dict[str, Any], field: str, reason: str, code: str) -> None:
    with pytest.raises(ApiError) as error:
        constraint_of(body)
    assert (error.value.status, error.value.param, error.value.code) == (400, field, code)
    assert error.value.message.startswith(f"{field}: ") and reason in error.value.message


@pytest.mark.parametrize(
    ("body", "first_field", "second_field"),
    [
        ({"response_format": FORMAT, "guided_json": SCHEMA}, f"{OF_FORMAT}.schema", "guided_json"),
        ({"regex": "a", "ebnf": "b"}, "regex", "ebnf"),
        (vllm(regex="a", choice=["b"]), "structured_outputs.regex", "structured_outputs.choice"),
        (
            {"response_format": {"type": "json_object"}, **vllm(json_object=True)},
            "response_format",
            "structured_outputs.json_object",
        ),
    ],
)
def test_two_constraints_in_a_request_are_refused_and_both_named(
    body: dict[str, Any], first_field: str, second_field: str
) -> None:
    with pytest.raises(ApiError) as error:
        constraint_of(body)
    assert (error.value.status, error.value.param) == (400, second_field)
    assert error.value.message.startswith(f"{second_field}: {first_field} asks for a form of the output too")


def test_grammar_error_becomes_a_400_that_names_the_field() -> None:
    error = invalid_value("guided_json", str(GrammarError("#: the keyword 'not' is not enforced; leave it out")))
    assert (error.status, error.param, error.code) == (400, "guided_json", "invalid_value")
    assert error.message == "guided_json: #: the keyword 'not' is not enforced; leave it out"
