"""How a server stops: signals, and the calls that are still open."""

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


class FakeIngressHandle:
    """A fake handle of an ingress. Each of `rounds` is the list of its replicas' answers to one broadcast."""

    def __init__(self, *rounds: list[Any]) -> None:
        self.broadcasts: list[str] = []
        self._rounds = list(rounds)

    def get_app_handle(self, name: str) -> "FakeIngressHandle":
        return self

    def broadcast(self, method: str) -> "FakeIngressHandle":
        self.broadcasts.append(method)
        return self

    def results(self, **_: Any) -> list[Any]:
        return self._rounds.pop(0) if len(self._rounds) > 1 else self._rounds[0]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_S", "ERRORS_TIMEOUT_S", "FLUSH_S"):
        monkeypatch.setattr(stop, name, 0.01)


@pytest.mark.parametrize(
    "replica_error",
    [GetTimeoutError(), ActorUnavailableError("", None), RuntimeError()],
    ids=lambda error: type(error).__name__,
)
def test_drain_asks_an_unresponsive_replica_again(replica_error: Exception) -> None:
    handle, messages = FakeIngressHandle([replica_error], [replica_error, 0], [3, 0], [0, 0]), []  # type: ignore[var-annotated]
    drain(handle, "aerie", 60.0, messages.append)
    assert handle.broadcasts == ["drain"] * 4
    assert messages and "draining" in messages[0]


def test_drain_does_not_wait_for_a_dead_replica() -> None:
    handle = FakeIngressHandle([ActorDiedError(), 0])
    drain(handle, "aerie", 60.0, print)
    assert handle.broadcasts == ["drain"]


def test_drain_ends_open_calls_at_the_timeout() -> None:
    handle, messages = FakeIngressHandle([GetTimeoutError()]), []  # type: ignore[var-annotated]
    drain(handle, "aerie", 0.05, messages.append)
    assert "end_streams" in handle.broadcasts
    assert "after graceful_shutdown_timeout_s" in messages[-1]


class ProcessExit(BaseException):
    """Raised instead of ending the process."""


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[StopSignals]:
    def fake_exit(status: int) -> None:
        raise ProcessExit(status)

    monkeypatch.setattr(os, "_exit", fake_exit)
    stop_signals = StopSignals()
    original_handler = signal.getsignal(signal.SIGTERM)
    with stop_signals.installed():
        yield stop_signals
    assert signal.getsignal(signal.SIGTERM) == original_handler
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


SIGNAL_SCRIPT = """
import os, signal, threading, time
from cluster.api.launch.stop import StopSignals

signals = StopSignals()
with signals.installed():
    signals.check()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # like Ray's own handler, it ends the process
    other_thread = threading.Thread(target=time.sleep, args=(0.5,))  # a thread that could take the signal
    other_thread.start()
    os.kill(os.getpid(), signal.SIGTERM)
    other_thread.join()
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
    """The script runs in a separate process, because threads of other tests could take the signal in this one."""
    process = subprocess.run([sys.executable, "-c", SIGNAL_SCRIPT], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout) == (0, "asked False\nasked True\nasked True\n"), process.stderr


@pytest.mark.parametrize(("second", "status"), [(signal.SIGTERM, "143"), (signal.SIGINT, "130")])
def test_first_signal_requests_stop_and_second_ends_the_process(signals: StopSignals, second: int, status: str) -> None:
    def fails() -> None:
        raise RuntimeError("Ray is half gone")

    signals.on_second_signal(fails)
    signals.release()
    assert not signals.stop_requested
    os.kill(os.getpid(), signal.SIGTERM)
    start_time = time.monotonic()
    signals.wait()
    assert signals.stop_requested and time.monotonic() - start_time < 5
    with pytest.raises(ProcessExit, match=status):
        os.kill(os.getpid(), second)
        time.sleep(5)


def test_ray_is_shut_down_even_when_serve_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("the controller is gone")

    ended_parts: list[str] = []
    serve_module = SimpleNamespace(shutdown=fails, delete=fails)
    monkeypatch.setattr(serve_command.importlib, "import_module", lambda _: serve_module)
    monkeypatch.setattr(serve_command.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(serve_command.ray, "shutdown", lambda: ended_parts.append("disconnected"))
    plan: Any = SimpleNamespace(file=SimpleNamespace(applications=[SimpleNamespace(name="aerie")]))
    own_cluster: Any = SimpleNamespace(stop=lambda: ended_parts.append("stopped"))
    for cluster in (own_cluster, None):
        with pytest.raises(RuntimeError, match="controller is gone"):
            serve_command._shut_down(cluster, plan, graceful=True)
    assert ended_parts == ["stopped", "disconnected"]


def test_shutdown_skips_serve_when_not_graceful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve would wait until its replica, which loads a model, has started."""
    monkeypatch.setattr(serve_command.ray, "is_initialized", lambda: True)
    ended_parts: list[str] = []
    own_cluster: Any = SimpleNamespace(stop=lambda: ended_parts.append("stopped"))
    serve_module = SimpleNamespace(shutdown=lambda: ended_parts.append("asked"))
    monkeypatch.setattr(serve_command.importlib, "import_module", lambda _: serve_module)
    for graceful in (False, True):
        serve_command._shut_down(own_cluster, SimpleNamespace(), graceful=graceful)  # type: ignore[arg-type]
    assert ended_parts == ["stopped", "asked", "stopped"]
