"""An ingress takes the facts of its model only from an engine with the ingress's own settings."""

import asyncio
from typing import Any

import pytest

from cluster.api.serve import application
from cluster.api.serve.application import _settings_key_of, _wait_for_model_facts
from cluster.api.serve.resilient_client import Attempt, EngineGoneError
from cluster.api.serve.settings import AppSettings
from cluster.request import Request


class ScriptedCalls:
    """`EngineCalls` whose calls return these answers in turn. A call raises an answer that is an exception."""

    def __init__(self, *answers: Any) -> None:
        self.remaining = list(answers)

    def open(self, request: Request) -> Attempt:
        raise AssertionError("the test opens no stream")

    async def call(self, method: str) -> Any:
        assert method == "model_facts"
        answer = self.remaining.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_ingress_waits_for_model_facts_of_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """During a redeploy, engines of the previous deployment answer too, or die during a call."""
    monkeypatch.setattr(application, "RETRY_S", 0.001)
    old_facts, own_facts = ("old", {"context_length": 4}), ("own", {"context_length": 2})
    calls = ScriptedCalls(old_facts, EngineGoneError("the actor died"), old_facts, own_facts, old_facts)
    assert asyncio.run(_wait_for_model_facts(calls, "own")) == {"context_length": 2}
    assert calls.remaining == [old_facts]


def settings_key(model_id: str = "a", **engine: object) -> str:
    settings = {"model_loading_config": {"model_id": model_id, "model_source": "/m"}, "engine_kwargs": engine}
    return _settings_key_of(AppSettings.model_validate({"llm_configs": [settings]}))


def test_settings_key_differs_for_settings_that_change_model_facts() -> None:
    assert settings_key() == settings_key()
    assert (
        len({settings_key(), settings_key("b"), settings_key(context_length=64), settings_key(tokenizer_path="/t")})
        == 4
    )
