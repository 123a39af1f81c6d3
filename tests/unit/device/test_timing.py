"""Times are those of the device's work, not of the host that queues it."""

import time
from dataclasses import dataclass

import pytest

from cluster.device.timing import HOST_TIMER, Spans
from cluster.distributed.progress import ProgressClock
from cluster.spec.result import PhaseTimes


@dataclass
class Queue:
    """A device that is told at once what takes it `work` seconds; a moment is when it will come there."""

    at: float = 0.0

    def tell(self, work: float) -> None:
        self.at += work

    def now(self) -> float:
        return self.at

    def between(self, start: float, end: float) -> float:
        return end - start


def test_spans_measure_device_work_inside_the_context_only() -> None:
    queue = Queue()
    spans = Spans(queue)
    for work in (2.0, 3.0):
        queue.tell(100.0)
        with spans:
            queue.tell(work)
    assert spans.take() == 5.0
    assert spans.take() == 0.0, "taken"


def test_spans_without_timer_use_the_host_clock() -> None:
    spans = Spans()
    with spans:
        time.sleep(0.02)
    assert 0.02 <= spans.take() < 1.0


def test_progress_clock_adds_host_and_device_collective_times() -> None:
    """The ranks' facts go over the host, their rows over the device."""
    clock, queue = ProgressClock(), Queue()
    began = clock.begin(queue)
    assert clock.is_waiting
    queue.tell(4.0)
    clock.end(began, queue)
    assert not clock.is_waiting and clock.collectives_returned == 1
    began = clock.begin(HOST_TIMER)
    clock.end(began, HOST_TIMER)
    assert clock.take_collective_spans().take() == pytest.approx(4.0, abs=0.1)


def test_phase_times_are_differences_of_consecutive_timestamps() -> None:
    assert PhaseTimes(Queue(), [1.0, 3.0, 6.0, 10.0]).seconds() == {"draft": 2.0, "target": 3.0, "extend": 4.0}
