"""What an ingress takes for facts of its model are those of an engine of its own settings."""

import asyncio
from typing import Any

import pytest

from cluster.api.serve import application
from cluster.api.serve.application import _settings_key_of, _wait_for_model_facts
from cluster.api.serve.resilient_client import Attempt, EngineGoneError
from cluster.api.serve.settings import AppSettings
from cluster.request import Request


class Answers:
    """`EngineCalls` that answer in turn; an error is raised."""

    def __init__(self, *answers: Any) -> None:
        self.left = list(answers)

    def open(self, request: Request) -> Attempt:
        raise AssertionError("nobody asks for tokens")

    async def call(self, method: str) -> Any:
        assert method == "model_facts"
        answer = self.left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_ingress_waits_for_model_facts_of_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a service is redeployed, those before it answer too, or die while they are asked."""
    monkeypatch.setattr(application, "RETRY_S", 0.001)
    old, own = ("old", {"context_length": 4}), ("own", {"context_length": 2})
    calls = Answers(old, EngineGoneError("the actor died"), old, own, old)
    assert asyncio.run(_wait_for_model_facts(calls, "own")) == {"context_length": 2}
    assert calls.left == [old]


def made_of(model_id: str = "a", **engine: object) -> str:
    settings = {"model_loading_config": {"model_id": model_id, "model_source": "/m"}, "engine_kwargs": engine}
    return _settings_key_of(AppSettings.model_validate({"llm_configs": [settings]}))


def test_settings_key_differs_for_settings_that_change_model_facts() -> None:
    assert made_of() == made_of()
    assert len({made_of(), made_of("b"), made_of(context_length=64), made_of(tokenizer_path="/t")}) == 4
