"""How a server ends: signals, and the calls that are still open."""

import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from cluster.api.launch import serve as serve_command
from cluster.api.launch import stop
from cluster.api.launch.stop import StopSignals, drain


class Front:
    """The handle of an ingress: what its replicas answer to one broadcast after the other."""

    def __init__(self, *rounds: list[Any]) -> None:
        self.told: list[str] = []
        self._rounds = list(rounds)

    def get_app_handle(self, name: str) -> "Front":
        return self

    def broadcast(self, method: str) -> "Front":
        self.told.append(method)
        return self

    def results(self, **_: Any) -> list[Any]:
        return self._rounds.pop(0) if len(self._rounds) > 1 else self._rounds[0]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_S", "ERRORS_TIMEOUT_S", "FLUSH_S"):
        monkeypatch.setattr(stop, name, 0.01)


@pytest.mark.parametrize(
    "silent",
    [GetTimeoutError(), ActorUnavailableError("", None), RuntimeError()],
    ids=lambda error: type(error).__name__,
)
def test_a_replica_that_does_not_answer_is_asked_again(silent: Exception) -> None:
    front, said = Front([silent], [silent, 0], [3, 0], [0, 0]), []  # type: ignore[var-annotated]
    drain(front, "aerie", 60.0, said.append)
    assert front.told == ["drain"] * 4
    assert said and "draining" in said[0]


def test_a_replica_that_is_dead_has_no_calls() -> None:
    front = Front([ActorDiedError(), 0])
    drain(front, "aerie", 60.0, print)
    assert front.told == ["drain"]


def test_calls_that_are_open_at_the_timeout_are_ended() -> None:
    front, said = Front([GetTimeoutError()]), []  # type: ignore[var-annotated]
    drain(front, "aerie", 0.05, said.append)
    assert "end_streams" in front.told
    assert "after graceful_shutdown_timeout_s" in said[-1]


class Left(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[StopSignals]:
    def leave(status: int) -> None:
        raise Left(status)

    monkeypatch.setattr(os, "_exit", leave)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    made = StopSignals()
    made.install()
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_signal_asks_and_the_second_ends(signals: StopSignals) -> None:
    assert not signals.asked
    os.kill(os.getpid(), signal.SIGTERM)
    began = time.monotonic()
    signals.wait()
    assert signals.asked and time.monotonic() - began < 5
    with pytest.raises(Left, match="143"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


def test_the_second_signal_ends_whatever_fails(signals: StopSignals) -> None:
    def fails() -> None:
        raise RuntimeError("Ray is half gone")

    signals.at_once = fails
    os.kill(os.getpid(), signal.SIGTERM)
    signals.wait()
    with pytest.raises(Left, match="130"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def test_ray_ends_whatever_serve_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("the controller is gone")

    ended: list[str] = []
    halves = SimpleNamespace(shutdown=fails, delete=fails)
    monkeypatch.setattr(serve_command.importlib, "import_module", lambda _: halves)
    monkeypatch.setattr(serve_command.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(serve_command.ray, "shutdown", lambda: ended.append("disconnected"))
    plan: Any = SimpleNamespace(file=SimpleNamespace(applications=[SimpleNamespace(name="aerie")]))
    own: Any = SimpleNamespace(stop=lambda: ended.append("stopped"))
    for cluster in (own, None):
        with pytest.raises(RuntimeError, match="controller is gone"):
            serve_command._shut_down(cluster, plan, serving=True)
    assert ended == ["stopped", "disconnected"]
