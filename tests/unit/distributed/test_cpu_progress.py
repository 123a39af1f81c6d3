"""Progress that is seen from outside: CPU time of the threads that compute, and of no others."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.distributed.cpu_progress import ProgressTracker, ThreadCpuTime


def burn(until: threading.Event) -> None:
    while not until.is_set():
        sum(range(1000))


@contextmanager
def computing(effort: ThreadCpuTime, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """A thread that begins `effort` and does some work until the end."""
    begun, over = threading.Event(), threading.Event()

    def run() -> None:
        effort.use_current_thread()
        begun.set()
        work(over)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def grows(effort: ThreadCpuTime, by: float = 0.05, within_s: float = 30.0) -> bool:
    began, until = effort.seconds(), time.monotonic() + within_s
    while time.monotonic() < until:
        if effort.seconds() - began > by:
            return True
        time.sleep(0.01)
    return False


def test_thread_cpu_time_counts_the_computing_thread() -> None:
    effort = ThreadCpuTime("aerie-test-1")
    with computing(effort, burn):
        assert grows(effort)


def test_thread_cpu_time_counts_threads_started_by_the_computing_thread() -> None:
    def starts_another(over: threading.Event) -> None:
        helper = threading.Thread(target=burn, args=(over,))
        helper.start()
        over.wait()
        helper.join()

    effort = ThreadCpuTime("aerie-test-2")
    with computing(effort, starts_another):
        assert grows(effort)


def test_thread_cpu_time_ignores_other_threads() -> None:
    effort, over = ThreadCpuTime("aerie-test-3"), threading.Event()
    other = threading.Thread(target=burn, args=(over,))
    other.start()
    try:
        with computing(effort, threading.Event.wait):
            assert not grows(effort, by=0.001, within_s=0.5)
    finally:
        over.set()
        other.join()


def test_thread_cpu_time_counts_the_thread_when_it_cannot_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "write_text", refused)
    effort = ThreadCpuTime("aerie-test-4")
    with computing(effort, burn):
        assert grows(effort)


def test_thread_cpu_time_counts_a_thread_that_starts_during_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that found the thread before it had its name keeps what it found; the thread counts all the same."""
    effort, named = ThreadCpuTime("aerie-test-5"), threading.Event()
    own = ThreadCpuTime._is_own

    def slow(self: ThreadCpuTime, task: str) -> bool | None:
        found = own(self, task)
        if task == str(thread.native_id):
            looked.set()
            named.wait()
        return found

    looked, begin, over = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        begin.wait()
        effort.use_current_thread()
        named.set()
        burn(over)

    thread = threading.Thread(target=run)
    thread.start()
    monkeypatch.setattr(ThreadCpuTime, "_is_own", slow)
    look = threading.Thread(target=effort.seconds)
    look.start()
    looked.wait()
    begin.set()
    look.join()
    monkeypatch.setattr(ThreadCpuTime, "_is_own", own)
    try:
        assert grows(effort)
    finally:
        over.set()
        thread.join()


class Spent(ThreadCpuTime):
    """CPU seconds by hand."""

    def __init__(self) -> None:
        super().__init__("aerie-test")
        self.spent = 0.0

    def seconds(self) -> float:
        return self.spent


def aged(marks: object, spent: float, waits: bool = False, after_s: float = 0.2) -> tuple[bool, bool]:
    """Whether a pulse of marks 1 and no CPU time is young, by anything and by marks, at the next look."""
    effort = Spent()
    pulse = ProgressTracker(effort)
    pulse.update(1)
    time.sleep(after_s)
    effort.spent = spent
    pulse.update(marks, waits)
    return pulse.idle_s < after_s, pulse.since_mark_s < after_s


def test_progress_tracker_counts_marks_and_cpu_time_as_progress() -> None:
    assert aged(1, 0.0) == (False, False)
    assert aged(2, 0.0) == (True, True)
    assert aged(1, 0.01) == (True, False)
    assert aged(1, 0.0001) == (False, False)  # a thread that wakes up now and then
    assert aged(1, 0.01, waits=True) == (False, False)  # polling for a peer is not work
    assert aged(2, 0.0, waits=True) == (True, True)


def test_progress_is_seen_after_the_cpu_time_of_an_ended_thread_disappears() -> None:
    effort = Spent()
    effort.spent = 50.0
    pulse = ProgressTracker(effort)
    pulse.update(1)
    effort.spent = 1.0
    pulse.update(1)
    time.sleep(0.1)
    effort.spent = 1.1
    pulse.update(1)
    assert pulse.idle_s < 0.1
