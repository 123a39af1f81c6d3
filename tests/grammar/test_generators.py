"""Tests of JSON Schemas that seven schema generators wrote, for every type.

The grammar enforces the whole schema, or the schema is refused with the name of the unsupported keyword.
"""

import json
import random
from typing import Any

import pytest

from cluster.grammar.asked import Grammar
from cluster.grammar.schema.convert import parse_exact_json
from tests.grammar.checks import validator_of
from tests.grammar.generators.table import PAGE, generators, page, refusal
from tests.grammar.walks import bytewise, walk

WALKS = 4
VALUES: list[Any] = [
    *[
        "",
        "red",
        "some words",
        "ab",
        "AB123",
        "AB1234",
        "https://example.org",
        "http://example.org",
        "a@example.org",
        "a@b",
    ],
    *[
        "123e4567-e89b-42d3-a456-426614174000",
        "123e4567",
        "2024-02-29",
        "2023-02-29",
        "12:30:00Z",
        "25:00:00Z",
        "12:30",
    ],
    *["2024-02-29T12:30:00Z", "2024-02-30T12:30:00Z", "P1DT2H", "P", "P1D2W", "10.0.0.1", "10.0.0.256", "2001:db8::1"],
    *["2001::db8::1", "a.example.org", "-a.org", "AAEC", "AAE", "abcdefgh", "user-5", "user-x", "12345", "a\n", "cat"],
    *[0, 1, 3, 5, 7, 130, 131, -1, 0.01, 0.005, 0.5, 1.5, 2**31, -(2**63), 2**63, 9007199254740992, True, None],
    *[
        [],
        ["red"],
        ["red", "red"],
        ["red", "blue"],
        [1],
        [1, 2, 3],
        [1, 2, 3, 4],
        ["a", 1],
        ["a", "b"],
        ["a", 1, 2],
        [True],
    ],
    *[{}, {"a": 1}, {"a": 1, "b": 2}, {"a": 1, "z": None}, {"a": "x"}, {"red": 1}, {"1": 1}, {"x-1": 1}, {"A": 1}],
    *[{"kind": "cat", "lives": 9}, {"kind": "dog", "name": "Rex"}, {"kind": "cat", "name": "Rex"}, {"kind": "cow"}],
    *[
        {"name": "Ada", "age": 36},
        {"name": "Ada"},
        {"value": 1, "children": []},
        {"value": 1, "children": [{"value": 2}]},
    ],
    *[{"name": "Ada", "pets": [{"name": "Rex", "owner": {"name": "Bob", "pets": []}}]}, {"name": "Ada", "pets": [{}]}],
    *[{"a": {"content": 1}, "b": {"content": "x"}}, {"a": {"content": "x"}, "b": {"content": "x"}}],
    *[{"from": {"x": 1, "y": 2}, "to": {"x": 1, "y": 2.5}}, {"from": {"x": 1}, "to": {"x": 1}}],
]
# For some types: a value that the grammar must accept, if the value is valid by the schema of the generator.
EXPECTED = {
    "string length": "ab",
    "string pattern": "AB123",
    "string prefix": "https://example.org",
    "email": "a@example.org",
    "uuid": "123e4567-e89b-42d3-a456-426614174000",
    "uri": "https://example.org",
    "date": "2024-02-29",
    "date-time": "2024-02-29T12:30:00Z",
    "duration": "P1DT2H",
    "ipv4": "10.0.0.1",
    "ipv6": "2001:db8::1",
    "hostname": "a.example.org",
    "bytes": "AAEC",
    "decimal": 0.01,
    "multiple": 5,
    "discriminated union": {"kind": "dog", "name": "Rex"},
    "intersection": {"name": "Ada", "age": 36},
    "recursive": {"value": 1, "children": []},
    "set of an enum": ["red", "blue"],
    "tuple": ["a", 1],
    "tuple and rest": ["a", 1, 2],
    "map by keys": {"a": 1, "b": 2},
}
OTHER_VALUES = {
    ("bytes", "victools/jsonschema-generator"),
    ("intersection", "ts-json-schema-generator"),
    ("tuple", "invopop/jsonschema"),
    ("map by keys", "pydantic"),
    ("map by keys", "ts-json-schema-generator"),
}
"""Types and generators whose schemas describe other values than the expected one."""
SCHEMAS_BY_GENERATOR = generators()


def test_docs_page_of_generators_matches_the_code() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.grammar.generators.table"


def test_all_generators_write_the_same_types() -> None:
    names = {tuple(sorted(types)) for types in SCHEMAS_BY_GENERATOR.values()}
    assert len(SCHEMAS_BY_GENERATOR) == 7 and len(names) == 1 and len(next(iter(names))) >= 40


def test_expected_values_are_valid_by_each_enforced_schema_but_the_listed_ones() -> None:
    """The test below skips a value that is invalid by the generator's schema."""
    assert EXPECTED.keys() <= next(iter(SCHEMAS_BY_GENERATOR.values())).keys()
    invalid_values = {
        (name, generator.split()[0])
        for generator, schemas in SCHEMAS_BY_GENERATOR.items()
        for name, value in EXPECTED.items()
        if (schema := schemas[name]) is not None
        and refusal(schema) is None
        and not validator_of(schema).is_valid(parse_exact_json(json.dumps({"v": value})))
    }
    assert invalid_values == OTHER_VALUES


@pytest.mark.parametrize("generator", SCHEMAS_BY_GENERATOR)
def test_grammar_enforces_every_accepted_generator_schema(generator: str) -> None:
    for name, schema in SCHEMAS_BY_GENERATOR[generator].items():
        if schema is None or refusal(schema) is not None:
            continue
        validator = validator_of(schema)
        grammar = Grammar("json_schema", json.dumps(schema))
        outputs = [
            walk(bytewise(), bytewise().matcher(grammar), seed, free_tokens=10 * seed + 5) for seed in range(WALKS)
        ]
        generated_texts = [output.decode() for output in outputs if output is not None]
        assert len(generated_texts) > WALKS // 2, f"{name}: most of the generated outputs did not end"
        for text in generated_texts:
            assert validator.is_valid(parse_exact_json(text)), f"{name}: {text}"
        value_texts = [json.dumps({"v": value}, ensure_ascii=False) for value in VALUES]
        for text in (
            *value_texts,
            *(mutate(text, seed) for seed, text in enumerate(generated_texts * 6)),
            "{}",
            "null",
        ):
            if bytewise().accepts(grammar, text):
                assert validator.is_valid(parse_exact_json(text)), f"{name}: {text} is accepted, but invalid"
        if name in EXPECTED and validator.is_valid(parse_exact_json(json.dumps({"v": EXPECTED[name]}))):
            value = EXPECTED[name]
            reordered_values = [value, dict(reversed(value.items()))] if isinstance(value, dict) else [value]
            texts = [json.dumps({"v": order}) for order in reordered_values]
            assert any(bytewise().accepts(grammar, text) for text in texts), f"{name}: {value} is not accepted"


def mutate(text: str, seed: int) -> str:
    """Return a JSON text with one random change: a character is removed, doubled, inserted or replaced.

    Most of the results are still JSON.
    """
    rng = random.Random(seed)
    position = rng.randrange(1, max(2, len(text) - 1))
    replacement = rng.choice(
        ["", text[position] * 2, rng.choice('aZ09-.,:"T @_') + text[position], rng.choice("aZ09-:.T@")]
    )
    return text[:position] + replacement + text[position + 1 :]
