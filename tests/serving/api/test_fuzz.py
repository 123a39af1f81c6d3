"""Random values in every field give an answer, or a 400 or 404 with a reason, and never a 5xx."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.api.anthropic.request import CountRequest, MessagesRequest
from cluster.api.core.conversation import ChatRequest, TokenizeRequest
from cluster.api.core.fields import HARMLESS, REFUSED, WARNING_HEADER
from cluster.api.core.generation import CompletionRequest, DetokenizeRequest
from cluster.api.http.routes import make_app
from cluster.api.openai.responses.request import ResponseRequest
from tests.serving.api.scripted import MODEL, Client, ScriptedService

NUMBERS = st.integers(-3, 300) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
WORDS = st.sampled_from(
    ["role", "content", "user", "text", "type", "include_usage", "name", "message", "function", "tool_use", "input"]
) | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=8
)
# path: (a valid request, the fields that the route reads)
GOOD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/v1/completions": ({"model": MODEL, "prompt": "hello"}, [*CompletionRequest.model_fields]),
    "/v1/chat/completions": (
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
        [*ChatRequest.model_fields],
    ),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 8}, [*ResponseRequest.honoured()]),
    "/v1/messages": ({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}, [*MessagesRequest.honoured()]),
    "/v1/messages/count_tokens": ({"messages": [{"role": "user", "content": "hi"}]}, [*CountRequest.honoured()]),
    "/tokenize": ({"prompt": "hello"}, [*TokenizeRequest.model_fields]),
    "/detokenize": ({"tokens": [104, 105]}, [*DetokenizeRequest.model_fields]),
}


@pytest.fixture(scope="module")
def client(tokenizer_folder: Path) -> Client:
    return Client(make_app(ScriptedService(tokenizer_folder)))


@pytest.mark.parametrize("path", GOOD)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_field_values_never_cause_a_5xx(client: Client, path: str, data: st.DataObject) -> None:
    good, fields = GOOD[path]
    names = st.sampled_from([*fields, *fields, *REFUSED, *HARMLESS]) | st.text(max_size=12)
    body = {**good, **data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=3))}
    response = client.post(path, body)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code == 200:
        assert response.headers.get(WARNING_HEADER, "").isprintable()
    else:
        error = response.json()["error"]
        assert error["message"]
        assert error.get("code", error["type"]) not in (None, "internal_error", "api_error")


KEYS = ("type", "role", "content", "text", "call_id", "name", "arguments", "output", "id", "input", "tool_use_id")
KEYS += ("thinking", "summary", "input_schema", "parameters")
LITERALS = ("message", "function_call", "function_call_output", "reasoning", "user", "assistant", "system", "{}", "c")
LITERALS += ("input_text", "output_text", "text", "tool_use", "tool_result", "thinking", "reasoning_text", "f")
PARTS = st.recursive(
    st.sampled_from(LITERALS) | SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=12,
)
ITEMS = st.lists(st.dictionaries(st.sampled_from(KEYS), PARTS, min_size=1, max_size=5) | PARTS, max_size=4)


@pytest.mark.parametrize(("path", "field"), [("/v1/responses", "input"), ("/v1/messages", "messages")])
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(items=ITEMS, tools=st.none() | ITEMS)
def test_random_conversation_items_never_cause_a_5xx(
    client: Client, path: str, field: str, items: Any, tools: Any
) -> None:
    good, _ = GOOD[path]
    response = client.post(path, {**good, field: items, "tools": tools})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        named_field, colon, _ = response.json()["error"]["message"].partition(":")
        assert colon and named_field.split(".")[0] in (field, "tools"), response.text
