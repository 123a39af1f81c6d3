"""/openapi.json: its references resolve, it lists every status, and its schemas reject what the server refuses."""

import json
from typing import Any

import jsonschema

from cluster.api.core.limits import RequestLimits
from cluster.api.core.wire import MAX_KEYS
from tests.serving.api.bad_conversations import ACCEPTED_BY_SCHEMA as CONVERSATIONS_ACCEPTED_BY_SCHEMA
from tests.serving.api.bad_conversations import TOOL
from tests.serving.api.scripted import MODEL, Client
from tests.serving.api.test_bad_input import CHAT, FIELDS, HI

BODY_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
# The cases of FIELDS whose body the schema accepts although the server refuses it. A schema cannot express their rules:
# these depend on another field's value, on the model's context or vocabulary, or on half surrogate pairs.
ACCEPTED_BY_SCHEMA = {
    *CONVERSATIONS_ACCEPTED_BY_SCHEMA,
    "token id outside the vocabulary",
    "token id of 401 digits",
    "half a surrogate pair",
    "prompt longer than the context",
    "prompt and output longer than the context",
    "too many sequences",
    "stream options without a stream",
    "max_tokens is huge",
    "max_tokens and max_completion_tokens differ",
    "max_completion_tokens is huge",
    "a stop with half a surrogate pair",
    "stop token outside the vocabulary",
    "logit_bias beyond the vocabulary",
    "response_format of an unknown type",
    "two grammars",
    "min_tokens beyond max_tokens",
    "top_logprobs without logprobs",
    "two different dp ranks",
    "a field in two spellings",
    "the template refuses",
    "template arguments that the server sets",
    "template arguments with half a surrogate pair",
    "conversation longer than the context",
    "prompt_logprobs in a stream",
    "best_of below n",
    "best_of in a stream",
    "template arguments that make the template fail",
}


def references(node: Any) -> set[str]:
    """The values of all `$ref` keys inside `node`."""
    if isinstance(node, dict):
        own_reference = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own_reference.union(*map(references, node.values()))
    return set[str]().union(*map(references, node)) if isinstance(node, list) else set()


def test_openapi_references_resolve_and_schemas_are_valid(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert references(document) <= {f"#/components/schemas/{name}" for name in schemas}
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_openapi_document_lists_the_statuses_of_every_route(document: dict[str, Any]) -> None:
    paths = document["paths"]
    for path in BODY_PATHS:
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


def schema_accepts(document: dict[str, Any], path: str, body: dict[str, Any]) -> bool:
    """Whether the schema of the path's request accepts the body."""
    name = "ChatRequest" if path == CHAT else "CompletionRequest"
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return bool(jsonschema.Draft202012Validator(schema).is_valid(body))


def test_openapi_schema_rejects_the_bodies_that_the_server_refuses(document: dict[str, Any]) -> None:
    accepted_names = set()
    for name, (path, fields, _, _) in FIELDS.items():
        good = {"messages": HI} if path == CHAT else {"prompt": "hello"}
        assert schema_accepts(document, path, good)
        body = json.loads(json.dumps({"model": MODEL, **good, **fields}))
        if schema_accepts(document, path, body):
            accepted_names.add(name)
    assert accepted_names == ACCEPTED_BY_SCHEMA


TOOL_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL_MESSAGES = [
    *HI,
    {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [TOOL_CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
]


def test_openapi_schema_accepts_the_bodies_that_the_server_accepts(document: dict[str, Any], client: Client) -> None:
    parts = [{"type": "text", "text": "hi"}]
    for fields in (
        {"stop": "x", "seed": 3, "n": 2, "temperature": 0, "top_logprobs": 2, "logprobs": True, "user": "me"},
        {"stop": ["x", "y"], "presence_penalty": 0, "response_format": {"type": "text"}, "unheard_of": 1},
        {"presence_penalty": 0.5, "logit_bias": {"5": -1}, "bad_words": ["x"], "allowed_token_ids": [1, 2]},
        {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False, "messages": TOOL_MESSAGES},
        {"tools": [], "tool_choice": "auto", "reasoning_effort": "none", "include_reasoning": False},
        {"messages": [{"role": "user", "content": parts}], "max_tokens": 3, "stream": False, "stop_token_ids": [1]},
    ):
        body = {"model": MODEL, "messages": HI, **fields}
        assert client.post(CHAT, body).status_code == 200
        assert schema_accepts(document, CHAT, body)


def test_openapi_limits_match_the_server_limits(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["n"]["maximum"] == RequestLimits().choices
    assert fields["top_a"]["enum"] == [0, None]
    assert fields["logit_bias"]["maxProperties"] == MAX_KEYS
