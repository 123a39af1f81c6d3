"""Progress seen from outside the computing thread: the CPU time of computing threads, and of no other threads."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.distributed import cpu_progress
from cluster.distributed.cpu_progress import ProgressTracker, ThreadCpuTime


def compute_until(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1000))


@contextmanager
def computing_thread(cpu_time: ThreadCpuTime, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run a thread that is measured by `cpu_time` and calls `work`, until the context ends."""
    started, stop = threading.Event(), threading.Event()

    def run() -> None:
        cpu_time.use_current_thread()
        started.set()
        work(stop)

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def grows(cpu_time: ThreadCpuTime, min_growth_s: float = 0.05, within_s: float = 30.0) -> bool:
    """Return whether the CPU time grows by more than `min_growth_s` within `within_s` seconds."""
    start_s, deadline = cpu_time.seconds(), time.monotonic() + within_s
    while time.monotonic() < deadline:
        if cpu_time.seconds() - start_s > min_growth_s:
            return True
        time.sleep(0.01)
    return False


def test_thread_cpu_time_counts_the_computing_thread() -> None:
    cpu_time = ThreadCpuTime("aerie-test-1")
    with computing_thread(cpu_time, compute_until):
        assert grows(cpu_time)


def test_thread_cpu_time_counts_threads_started_by_the_computing_thread() -> None:
    def start_helper(stop: threading.Event) -> None:
        helper = threading.Thread(target=compute_until, args=(stop,))
        helper.start()
        stop.wait()
        helper.join()

    cpu_time = ThreadCpuTime("aerie-test-2")
    with computing_thread(cpu_time, start_helper):
        assert grows(cpu_time)


def test_thread_cpu_time_ignores_other_threads() -> None:
    cpu_time, stop = ThreadCpuTime("aerie-test-3"), threading.Event()
    other_thread = threading.Thread(target=compute_until, args=(stop,))
    other_thread.start()
    try:
        with computing_thread(cpu_time, threading.Event.wait):
            assert not grows(cpu_time, min_growth_s=0.001, within_s=0.2)
    finally:
        stop.set()
        other_thread.join()


def test_thread_cpu_time_counts_the_thread_when_it_cannot_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_permission_error(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "write_text", raise_permission_error)
    cpu_time = ThreadCpuTime("aerie-test-4")
    with computing_thread(cpu_time, compute_until):
        assert grows(cpu_time)


def test_thread_cpu_time_counts_a_thread_that_starts_during_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan finds the thread before the thread has its name, and remembers that. The thread must still count."""
    cpu_time, named = ThreadCpuTime("aerie-test-5"), threading.Event()
    original_is_own = ThreadCpuTime._is_own

    def slow_is_own(self: ThreadCpuTime, task: str) -> bool | None:
        is_own = original_is_own(self, task)
        if task == str(thread.native_id):
            scanned.set()
            named.wait()
        return is_own

    scanned, begin, stop = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        begin.wait()
        cpu_time.use_current_thread()
        named.set()
        compute_until(stop)

    thread = threading.Thread(target=run)
    thread.start()
    monkeypatch.setattr(ThreadCpuTime, "_is_own", slow_is_own)
    scan_thread = threading.Thread(target=cpu_time.seconds)
    scan_thread.start()
    scanned.wait()
    begin.set()
    scan_thread.join()
    monkeypatch.setattr(ThreadCpuTime, "_is_own", original_is_own)
    try:
        assert grows(cpu_time)
    finally:
        stop.set()
        thread.join()


class FakeCpuTime(ThreadCpuTime):
    """A fake whose CPU time `cpu_s` (seconds) the test sets."""

    def __init__(self) -> None:
        super().__init__("aerie-test")
        self.cpu_s = 0.0

    def seconds(self) -> float:
        return self.cpu_s


class FakeClock:
    """A fake of the module `time`, whose clock shows `now`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake_clock = FakeClock()
    monkeypatch.setattr(cpu_progress, "time", fake_clock)
    return fake_clock


@pytest.mark.parametrize(
    ("marks", "cpu_s", "is_waiting", "is_progress", "is_new_mark"),
    [
        (1, 0.0, False, False, False),
        (2, 0.0, False, True, True),
        (1, 0.01, False, True, False),
        (1, 0.0001, False, False, False),  # so little is an idle thread that wakes up now and then
        (1, 0.01, True, False, False),  # polling for a peer is not work
        (2, 0.0, True, True, True),
    ],
)
def test_progress_tracker_counts_marks_and_cpu_time_as_progress(
    clock: FakeClock, marks: int, cpu_s: float, is_waiting: bool, is_progress: bool, is_new_mark: bool
) -> None:
    """The first update has 1 mark and no CPU time; the second one, 2 s later, has `marks` and `cpu_s`."""
    cpu_time = FakeCpuTime()
    tracker = ProgressTracker(cpu_time)
    tracker.update(1)
    clock.now, cpu_time.cpu_s = 2.0, cpu_s
    tracker.update(marks, is_waiting)
    assert (tracker.idle_s, tracker.since_mark_s) == (0.0 if is_progress else 2.0, 0.0 if is_new_mark else 2.0)


def test_progress_is_seen_after_the_cpu_time_of_an_ended_thread_disappears(clock: FakeClock) -> None:
    cpu_time = FakeCpuTime()
    cpu_time.cpu_s = 50.0
    tracker = ProgressTracker(cpu_time)
    tracker.update(1)
    cpu_time.cpu_s = 1.0
    tracker.update(1)
    clock.now, cpu_time.cpu_s = 0.1, 1.1
    tracker.update(1)
    assert tracker.idle_s == 0.0
