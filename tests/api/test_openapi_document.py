"""/openapi.json is true: it stands on its own, names every status, and does not allow what is refused."""

import json
from typing import Any

import jsonschema

from cluster.api.core.limits import RequestLimits
from cluster.api.core.wire import MAX_KEYS
from tests.api.bad_conversations import BEYOND_A_SCHEMA as BEYOND_OF_CONVERSATIONS
from tests.api.bad_conversations import TOOL
from tests.api.scripted import MODEL, Client
from tests.api.test_bad_input import CHAT, FIELDS, HI

BODIES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
# Refused for what a schema cannot say: another field's value, the model's context or vocabulary, or half characters.
BEYOND_A_SCHEMA = {
    *BEYOND_OF_CONVERSATIONS,
    "token id outside the vocabulary",
    "astronomical token id",
    "half a surrogate pair",
    "prompt longer than the context",
    "prompt and output longer",
    "too many sequences",
    "stream options without a stream",
    "stream options of another type",
    "max_tokens is huge",
    "two different limits",
    "chat limit beyond the context",
    "a stop that is not text",
    "stop token outside the vocabulary",
    "logit_bias beyond the vocabulary",
    "response_format of another kind",
    "two grammars",
    "min_tokens beyond max_tokens",
    "top_logprobs without logprobs",
    "two different dp ranks",
    "a field in two spellings",
    "the template refuses",
    "template arguments that replace ours",
    "template arguments that are not text",
    "conversation longer than the context",
    "prompt_logprobs in a stream",
    "best_of below n",
    "best_of in a stream",
    "template arguments that break it",
}


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set[str]().union(*map(references, node)) if isinstance(node, list) else set()


def test_openapi_references_resolve_and_schemas_are_valid(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert references(document) <= {f"#/components/schemas/{name}" for name in schemas}
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_openapi_document_lists_the_statuses_of_every_route(document: dict[str, Any]) -> None:
    paths = document["paths"]
    for path in BODIES:
        assert {"200", "400", "404", "408", "413", "415", "503"} <= set(paths[path]["post"]["responses"])
    assert "404" in paths["/v1/models/{model_id}"]["get"]["responses"]
    assert "200" not in paths["/v1/responses/{response_id}"]["get"]["responses"]
    for path, operations in paths.items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert ({"401", "403"} <= {*operation["responses"]}) == (path not in ("/health", "/ready"))
    assert "text/event-stream" in paths["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert "content" not in paths["/health"]["get"]["responses"]["200"]
    assert "503" in paths["/ready"]["get"]["responses"]
    assert [*paths["/metrics"]["get"]["responses"]["200"]["content"]] == ["text/plain"]


def fits(document: dict[str, Any], path: str, body: dict[str, Any]) -> bool:
    name = "ChatRequest" if path == CHAT else "CompletionRequest"
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return bool(jsonschema.Draft202012Validator(schema).is_valid(body))


def test_openapi_schema_rejects_the_bodies_that_the_server_refuses(document: dict[str, Any]) -> None:
    assert {*FIELDS} >= BEYOND_A_SCHEMA
    fitting = set()
    for name, (path, fields, _, _) in FIELDS.items():
        good = {"messages": HI} if path == CHAT else {"prompt": "hello"}
        assert fits(document, path, good)
        body = json.loads(json.dumps({"model": MODEL, **good, **fields}))
        if fits(document, path, body):
            fitting.add(name)
    assert fitting <= BEYOND_A_SCHEMA


CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ANSWERED = [
    *HI,
    {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
]


def test_openapi_schema_accepts_the_bodies_that_the_server_accepts(document: dict[str, Any], client: Client) -> None:
    parts = [{"type": "text", "text": "hi"}]
    for fields in (
        {"stop": "x", "seed": 3, "n": 2, "temperature": 0, "top_logprobs": 2, "logprobs": True, "user": "me"},
        {"stop": ["x", "y"], "presence_penalty": 0, "response_format": {"type": "text"}, "unheard_of": 1},
        {"presence_penalty": 0.5, "logit_bias": {"5": -1}, "bad_words": ["x"], "allowed_token_ids": [1, 2]},
        {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False, "messages": ANSWERED},
        {"tools": [], "tool_choice": "auto", "reasoning_effort": "none", "include_reasoning": False},
        {"messages": [{"role": "user", "content": parts}], "max_tokens": 3, "stream": False, "stop_token_ids": [1]},
    ):
        body = {"model": MODEL, "messages": HI, **fields}
        assert client.post(CHAT, body).status_code == 200
        assert fits(document, CHAT, body)


def test_openapi_limits_match_the_server_limits(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["n"]["maximum"] == RequestLimits().choices
    assert fields["top_a"]["enum"] == [0, None]
    assert fields["logit_bias"]["maxProperties"] == MAX_KEYS
