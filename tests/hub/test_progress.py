"""A download ends soon after it is interrupted, and writes its progress to the log."""

import logging
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.arch.hub import progress
from cluster.arch.hub.progress import BYTES_BAR, THREAD_NAME, run_with_progress


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also in a pytest that was started in the background and ignores the signal."""
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous_handler)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_ends_the_download() -> None:
    def download(bar: Any) -> None:
        with bar(total=100) as progress_bar:
            progress_bar.update(1)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # as Ctrl-C
            while True:
                progress_bar.update(1)
                time.sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        run_with_progress("org/model", download)
    for thread in threading.enumerate():
        if thread.name.startswith(THREAD_NAME):
            thread.join(10)
            assert not thread.is_alive()


def test_download_progress_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 10.0, 40.0, 50.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))

    def download(bar: Any) -> None:
        with bar(total=8_000_000_000, name=BYTES_BAR) as progress_bar:
            for _ in range(3):
                progress_bar.update(2_000_000_000)

    with caplog.at_level(logging.INFO, "cluster.arch.hub.progress"):
        run_with_progress("org/model", download)
    assert caplog.messages == ["downloading org/model: 4.00 of 8.00 GB"]
