"""How a server ends: signals, and the calls that are still open."""

import os
import signal
import subprocess
import sys
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
def test_drain_asks_an_unresponsive_replica_again(silent: Exception) -> None:
    front, said = Front([silent], [silent, 0], [3, 0], [0, 0]), []  # type: ignore[var-annotated]
    drain(front, "aerie", 60.0, said.append)
    assert front.told == ["drain"] * 4
    assert said and "draining" in said[0]


def test_drain_does_not_wait_for_a_dead_replica() -> None:
    front = Front([ActorDiedError(), 0])
    drain(front, "aerie", 60.0, print)
    assert front.told == ["drain"]


def test_drain_ends_open_calls_at_the_timeout() -> None:
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
    made = StopSignals()
    before = signal.getsignal(signal.SIGTERM)
    with made.installed():
        yield made
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


HELD = """
import os, signal, threading, time
from cluster.api.launch.stop import StopSignals

signals = StopSignals()
with signals.installed():
    signals.check()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray's own handler, it ends the process
    beside = threading.Thread(target=time.sleep, args=(0.5,))  # a thread that could take the signal
    beside.start()
    os.kill(os.getpid(), signal.SIGTERM)
    beside.join()
    for _ in range(2):
        try:
            signals.check()
        except KeyboardInterrupt:
            print("asked", signals.stop_requested)
        signals.release()

again = StopSignals()
with again.installed():
    os.kill(os.getpid(), signal.SIGTERM)  # never released
print("asked", again.stop_requested)
"""


def test_signal_during_ray_start_waits_for_our_handler() -> None:
    """In a process of its own: threads that others started here could take the signal."""
    ran = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "asked False\nasked True\nasked True\n"), ran.stderr


@pytest.mark.parametrize(("second", "status"), [(signal.SIGTERM, "143"), (signal.SIGINT, "130")])
def test_first_signal_requests_stop_and_second_ends_the_process(signals: StopSignals, second: int, status: str) -> None:
    def fails() -> None:
        raise RuntimeError("Ray is half gone")

    signals.on_second_signal(fails)
    signals.release()
    assert not signals.stop_requested
    os.kill(os.getpid(), signal.SIGTERM)
    began = time.monotonic()
    signals.wait()
    assert signals.stop_requested and time.monotonic() - began < 5
    with pytest.raises(Left, match=status):
        os.kill(os.getpid(), second)
        time.sleep(5)


def test_ray_is_shut_down_even_when_serve_fails(monkeypatch: pytest.MonkeyPatch) -> None:
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
            serve_command._shut_down(cluster, plan, graceful=True)
    assert ended == ["stopped", "disconnected"]


def test_shutdown_skips_serve_when_not_graceful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve would wait until its replica, which loads a model, has started."""
    monkeypatch.setattr(serve_command.ray, "is_initialized", lambda: True)
    ended: list[str] = []
    own: Any = SimpleNamespace(stop=lambda: ended.append("stopped"))
    halves = SimpleNamespace(shutdown=lambda: ended.append("asked"))
    monkeypatch.setattr(serve_command.importlib, "import_module", lambda _: halves)
    for orderly in (False, True):
        serve_command._shut_down(own, SimpleNamespace(), graceful=orderly)  # type: ignore[arg-type]
    assert ended == ["stopped", "asked", "stopped"]
