"""Measured times are those of the device's work, not of the host's calls that queue the work."""

import time
from dataclasses import dataclass

import pytest

from cluster.device.timing import HOST_TIMER, Spans
from cluster.distributed.progress import ProgressClock
from cluster.spec.result import PhaseTimes


@dataclass
class FakeDevice:
    """A fake asynchronous device and its timer. The host enqueues work without waiting.

    A moment is the time at which the device will have done all work enqueued so far, `queue_end`.
    """

    queue_end: float = 0.0

    def enqueue(self, seconds: float) -> None:
        self.queue_end += seconds

    def now(self) -> float:
        return self.queue_end

    def between(self, start: float, end: float) -> float:
        return end - start


def test_spans_measure_device_work_inside_the_context_only() -> None:
    device = FakeDevice()
    spans = Spans(device)
    for seconds in (2.0, 3.0):
        device.enqueue(100.0)
        with spans:
            device.enqueue(seconds)
    assert spans.take() == 5.0
    assert spans.take() == 0.0, "take() must reset the spans"


def test_spans_without_timer_use_the_host_clock() -> None:
    spans = Spans()
    with spans:
        time.sleep(0.02)
    assert 0.02 <= spans.take() < 1.0


def test_progress_clock_adds_host_and_device_collective_times() -> None:
    """Ranks exchange step facts in host collectives and rows in device collectives."""
    clock, device = ProgressClock(), FakeDevice()
    start = clock.begin(device)
    assert clock.is_waiting
    device.enqueue(4.0)
    clock.end(start, device)
    assert not clock.is_waiting and clock.collectives_returned == 1
    start = clock.begin(HOST_TIMER)
    clock.end(start, HOST_TIMER)
    assert clock.take_collective_spans().take() == pytest.approx(4.0, abs=0.1)


def test_phase_times_are_differences_of_consecutive_timestamps() -> None:
    assert PhaseTimes(FakeDevice(), [1.0, 3.0, 6.0, 10.0]).seconds() == {"draft": 2.0, "target": 3.0, "extend": 4.0}
