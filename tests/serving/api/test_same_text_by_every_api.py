"""One conversation with one seed over a real engine: every API returns the same text, streamed or complete."""

from typing import Any

import pytest

from cluster.api.http.routes import make_app
from tests.serving.api.bad_items import MESSAGES, RESPONSES
from tests.serving.api.scripted import MODEL, Client
from tests.serving.api.test_engine import EngineService
from tests.serving.api.test_engine import services as services
from tests.serving.api.test_responses_and_messages import answer_text, named_events

CONVERSATION = [("user", "once"), ("assistant", "upon"), ("user", "a time 😀")]
MAX_TOKENS = 48
SAMPLINGS = ({"temperature": 0}, {"seed": 3}, {"seed": 4, "top_p": 0.9, "top_k": 20, "presence_penalty": 1.5})


@pytest.fixture(scope="module")
def service(services: tuple[EngineService, ...]) -> EngineService:
    return services[0]


def bodies(system: str, **fields: Any) -> dict[str, dict[str, Any]]:
    """The request bodies of the conversation, by path."""
    messages = [{"role": role, "content": text} for role, text in CONVERSATION]
    common_fields = {"model": MODEL, **fields}
    return {
        RESPONSES: {**common_fields, "input": messages, "instructions": system, "max_output_tokens": MAX_TOKENS},
        MESSAGES: {**common_fields, "messages": messages, "system": system, "max_tokens": MAX_TOKENS},
    }


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_all_apis_return_the_same_text_streamed_and_complete(service: EngineService, sampling: dict[str, Any]) -> None:
    client = Client(make_app(service))
    conversation = [
        {"role": "system", "content": "be brief"},
        *({"role": role, "content": text} for role, text in CONVERSATION),
    ]
    chat = client.chat(messages=conversation, max_tokens=MAX_TOKENS, **sampling).json()
    text = chat["choices"][0]["message"]["content"]
    assert text
    for path, body in bodies("be brief", **sampling).items():
        complete_answer = client.post(path, body).json()
        assert answer_text(path, complete_answer) == text
        assert complete_answer["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
        events = named_events(client.post(path, {**body, "stream": True}).text)
        deltas = [data["delta"] for name, data in events if name.endswith(("text.delta", "block_delta"))]
        assert "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas) == text
        is_truncated = chat["choices"][0]["finish_reason"] == "length"
        if path == RESPONSES:
            assert complete_answer["status"] == ("incomplete" if is_truncated else "completed")
        else:
            assert complete_answer["stop_reason"] == ("max_tokens" if is_truncated else "end_turn")


def test_all_apis_return_the_same_text_under_a_json_schema(service: EngineService) -> None:
    client = Client(make_app(service))
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    format_fields = {
        RESPONSES: {"text": {"format": {"type": "json_schema", "name": "p", "schema": schema}}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }
    chat_format = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    conversation = [
        {"role": "system", "content": "x"},
        *({"role": role, "content": text} for role, text in CONVERSATION),
    ]
    chat_choice = client.chat(messages=conversation, max_tokens=MAX_TOKENS, seed=5, response_format=chat_format).json()[
        "choices"
    ][0]
    assert chat_choice["finish_reason"] == "stop"
    for path, body in bodies("x", seed=5).items():
        assert (
            answer_text(path, client.post(path, {**body, **format_fields[path]}).json())
            == chat_choice["message"]["content"]
        )
