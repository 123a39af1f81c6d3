"""The metrics page of all ingress replicas when some replicas do not answer."""

import asyncio
import time
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError
from ray.serve.handle import DeploymentBroadcastResponse

from cluster.api.serve import application
from cluster.api.serve.application import ResilientService
from cluster.observability.metrics import ServingMetrics


class FakeReplicaResponse:
    """A fake of Serve's response of one replica: bytes, an error, or None for a replica that never answers."""

    def __init__(self, answer: bytes | Exception | None) -> None:
        self._answer = answer

    def get(self, timeout_s: float | None) -> bytes:
        if self._answer is None:
            assert timeout_s is not None
            time.sleep(timeout_s)
            raise GetTimeoutError
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    async def get_async(self) -> bytes:
        if self._answer is None:
            await asyncio.Event().wait()
        return self.get(None)


class FakeIngressHandle:
    """A fake handle of the ingress deployment."""

    def __init__(self, *answers: bytes | Exception | None) -> None:
        self._answers = answers

    def broadcast(self, method: str) -> Any:
        async def replicas() -> list[FakeReplicaResponse]:
            return [FakeReplicaResponse(answer) for answer in self._answers]

        return DeploymentBroadcastResponse(replicas(), asyncio.get_running_loop())  # type: ignore[arg-type]


class NoGrammars:
    """Replaces the class that compiles grammars."""

    def __init__(self, tokenizer: None, model: None) -> None:
        pass

    def start(self) -> None:
        pass


@pytest.mark.parametrize("silent", [None, ActorDiedError()], ids=["silent", "dead"])
def test_unreachable_replica_does_not_hide_metrics_of_other_replicas(
    monkeypatch: pytest.MonkeyPatch, silent: Exception | None
) -> None:
    monkeypatch.setattr(application, "PEERS_TIMEOUT_S", 0.3)
    engine: Any = None

    async def ingress_samples(*answers: bytes | Exception | None) -> list[bytes]:
        rest = application.RestParts(
            make_app=None, tokenizer=None, model_info_class=None, grammars_class=NoGrammars, drain_class=None
        )
        service = ResilientService(engine, None, rest, ServingMetrics(model_name="m"), FakeIngressHandle(*answers))
        return await service._ingress_samples()

    assert asyncio.run(ingress_samples(b"one", silent, b"two")) == [b"one", b"two"]
    (own_samples,) = asyncio.run(ingress_samples(silent))
    assert b"aerie" in own_samples
