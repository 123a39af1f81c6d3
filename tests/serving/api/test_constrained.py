"""Constrained output over HTTP, with a real engine: draft trees and plain decoding give the same text, in
its grammar.
"""

import json
import re
from typing import Any

import pytest

from cluster.api.http.routes import make_app
from tests.serving.api.scripted import Client, events
from tests.serving.api.test_engine import EngineService
from tests.serving.api.test_engine import services as services
from tests.support.slow_cases import diagonals_fast

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# name: (fields of the request, regular expression of the text; empty where the text must fit the schema PERSON)
GRAMMAR_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}}, ""),
    "guided": ({"guided_json": PERSON}, ""),
    "structured": ({"structured_outputs": {"json": PERSON}}, ""),
    "regex": ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}, "yes|no|perhaps"),
    "ebnf": ({"ebnf": 'root ::= "<" [a-z]+ ">"', "max_tokens": 200}, "<[a-z]+>"),
}
SAMPLINGS = ({"temperature": 0}, {"seed": 5}, {"seed": 6, "top_p": 0.9, "repetition_penalty": 1.2})


@pytest.mark.parametrize(("name", "sampling"), diagonals_fast(3, list(GRAMMAR_FIELDS), SAMPLINGS))
def test_constrained_text_fits_its_grammar_with_and_without_speculation(
    services: tuple[EngineService, EngineService], name: str, sampling: dict[str, Any]
) -> None:
    fields, pattern = GRAMMAR_FIELDS[name]
    body = {"prompt": "once", "max_tokens": 120, **sampling, **fields}
    tree_client, plain_client = (Client(make_app(service)) for service in services)
    choices = [client.complete(**body).json()["choices"][0] for client in (tree_client, plain_client)]
    assert (
        choices[0]["text"] == choices[1]["text"]
        and choices[0]["finish_reason"] == choices[1]["finish_reason"] == "stop"
    )
    streamed = "".join(chunk["choices"][0]["text"] for chunk in events(tree_client.complete(**body, stream=True)))
    assert streamed == choices[0]["text"]
    if pattern:
        assert re.fullmatch(pattern, streamed)
    else:
        person = json.loads(streamed)
        assert len(person["name"]) <= 8 and 0 <= person["age"] <= 99 and set(person) == {"name", "age"}


def test_grammar_raises_the_accept_length(services: tuple[EngineService, EngineService]) -> None:
    body = {"prompt": "once", "max_tokens": 120, "temperature": 0}
    tree = Client(make_app(services[0]))
    constrained, unconstrained = (
        tree.complete(**body, **fields).json() for fields in (GRAMMAR_FIELDS["schema"][0], {"ignore_eos": True})
    )
    counts = [answer["metrics"]["speculative_decoding"] for answer in (constrained, unconstrained)]
    accept_lengths = [1 + count["num_accepted_draft_tokens"] / max(1, count["num_spec_steps"]) for count in counts]
    print(accept_lengths)
    assert accept_lengths[0] > accept_lengths[1]


@pytest.mark.parametrize(
    ("fields", "param", "message_part"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be one of"),
        ({"regex": "("}, "regex", "a ( is not closed"),
        ({"guided_json": {"not": {}}}, "guided_json", "not"),
        ({"regex": "a", "ebnf": "b"}, "ebnf", "send one of them"),
        ({"ebnf": "root = nothing"}, "ebnf", 'root rule with name "root" is not found'),
    ],
)
def test_unsupported_grammar_gives_a_400_that_names_the_field(
    services: tuple[EngineService, EngineService], fields: dict[str, Any], param: str, message_part: str
) -> None:
    answer = Client(make_app(services[0])).complete(prompt="once", **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and message_part in error["message"]
