"""One conversation and seed over a real engine: the text is the same by every API, streamed or whole."""

from typing import Any

import pytest

from cluster.api.http.routes import make_app
from tests.api.bad_items import MESSAGES, RESPONSES
from tests.api.scripted import MODEL, Client
from tests.api.test_engine import EngineService
from tests.api.test_engine import services as services
from tests.api.test_responses_and_messages import named, said

TALK = [("user", "once"), ("assistant", "upon"), ("user", "a time 😀")]
LENGTH = 48
SAMPLINGS = ({"temperature": 0}, {"seed": 3}, {"seed": 4, "top_p": 0.9, "top_k": 20, "presence_penalty": 1.5})


@pytest.fixture(scope="module")
def service(services: tuple[EngineService, ...]) -> EngineService:
    return services[0]


def bodies(system: str, **fields: Any) -> dict[str, dict[str, Any]]:
    messages = [{"role": role, "content": text} for role, text in TALK]
    given = {"model": MODEL, **fields}
    return {
        RESPONSES: {**given, "input": messages, "instructions": system, "max_output_tokens": LENGTH},
        MESSAGES: {**given, "messages": messages, "system": system, "max_tokens": LENGTH},
    }


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_all_apis_return_the_same_text_streamed_and_complete(service: EngineService, sampling: dict[str, Any]) -> None:
    client = Client(make_app(service))
    talk = [{"role": "system", "content": "be brief"}, *({"role": role, "content": text} for role, text in TALK)]
    chat = client.chat(messages=talk, max_tokens=LENGTH, **sampling).json()
    text = chat["choices"][0]["message"]["content"]
    assert text
    for path, body in bodies("be brief", **sampling).items():
        whole = client.post(path, body).json()
        assert said(path, whole) == text
        assert whole["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
        found = named(client.post(path, {**body, "stream": True}).text)
        deltas = [data["delta"] for name, data in found if name.endswith(("text.delta", "block_delta"))]
        assert "".join(one if isinstance(one, str) else one["text"] for one in deltas) == text
        cut = chat["choices"][0]["finish_reason"] == "length"
        if path == RESPONSES:
            assert whole["status"] == ("incomplete" if cut else "completed")
        else:
            assert whole["stop_reason"] == ("max_tokens" if cut else "end_turn")


def test_all_apis_return_the_same_text_under_a_json_schema(service: EngineService) -> None:
    client = Client(make_app(service))
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    forms = {
        RESPONSES: {"text": {"format": {"type": "json_schema", "name": "p", "schema": schema}}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    talk = [{"role": "system", "content": "x"}, *({"role": role, "content": text} for role, text in TALK)]
    expected = client.chat(messages=talk, max_tokens=LENGTH, seed=5, response_format=form).json()["choices"][0]
    assert expected["finish_reason"] == "stop"
    for path, body in bodies("x", seed=5).items():
        assert said(path, client.post(path, {**body, **forms[path]}).json()) == expected["message"]["content"]
