"""How a server ends."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from cluster.api.stop import StopSignals


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
