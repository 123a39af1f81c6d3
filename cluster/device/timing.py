"""Measures the time of a device's work: by the host's clock on a CPU, by CUDA events on a GPU.

A GPU runs asynchronously. With the host's clock, a launch would seem to take almost no time, and the first call that
reads a result would seem to take the time of all the work before it.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class Timer(Protocol):
    """Marks moments in a device's work, and measures the time between two of them."""

    def now(self) -> Any:
        """Return a mark for this moment: the device reaches it when it has done all work that is queued now."""

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two moments; the device must have reached both."""

    def reached(self, moment: Any) -> bool:
        """Return whether the device has reached a moment; does not wait."""

    def make_current(self) -> None:
        """Make this device the current one of the calling thread: CUDA keeps a current device per thread."""


class HostTimer:
    """The timer of a CPU: moments are times of the host's clock."""

    def now(self) -> float:
        """Return the host's clock, in seconds."""
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        """Return the difference in seconds."""
        return end - start

    def reached(self, moment: float) -> bool:
        """Return True: a CPU has done all work that it was given."""
        return True

    def make_current(self) -> None:
        """Do nothing: there is one CPU."""


class EventTimer:
    """The timer of a GPU: moments are CUDA events on the current stream. During a graph capture nothing runs, and a
    moment is None. Such a moment counts as reached, and a span that begins or ends with it takes 0 seconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        """Record an event on the current stream; None during a graph capture."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two events."""
        if start is None or end is None:
            return 0.0
        seconds: float = start.elapsed_time(end) / 1e3
        return seconds

    def reached(self, moment: Any) -> bool:
        """Query the event."""
        return moment is None or bool(moment.query())

    def make_current(self) -> None:
        """Set CUDA's current device."""
        if self._device.index is not None:  # without an index it is the default device of every thread
            torch.cuda.set_device(self._device)


HOST_TIMER = HostTimer()


def timer_of(device: torch.device) -> Timer:
    """Return the timer of a device."""
    return EventTimer(device) if device.type == "cuda" else HOST_TIMER


@dataclass(slots=True)
class Spans:
    """Collects time spans of a device's work. Call `take` only when the device has reached the end of all of them."""

    timer: Timer = HOST_TIMER
    _spans: list[tuple[Timer, Any, Any]] = field(default_factory=list)
    _started: Any = None

    def __enter__(self) -> None:
        self._started = self.timer.now()

    def __exit__(self, *_: object) -> None:
        self.add(self.timer, self._started)

    def add(self, timer: Timer, started: Any) -> Any:
        """Add a span that began at the moment `started` of `timer` and ends now; return the moment of its end."""
        ended = timer.now()
        self._spans.append((timer, started, ended))
        return ended

    def split(self) -> "Spans":
        """Move the spans so far into a new object and return it."""
        spans, self._spans = Spans(self.timer, self._spans), []
        return spans

    def take(self) -> float:
        """Return the total seconds of the spans so far, and forget them."""
        spans, self._spans = self._spans, []
        return sum(timer.between(start, end) for timer, start, end in spans)
