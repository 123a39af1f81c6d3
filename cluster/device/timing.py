"""Time as a device spends it: by the host's clock where it computes at once, by events where it is only told to.

A GPU runs behind the host. The host's clock would measure how long telling takes, and charge all the waiting to what
reads a result first.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class Timer(Protocol):
    """Notes moments of a device's work, and says how far apart two of them were."""

    def now(self) -> Any:
        """A moment: when the device comes to this point of its work."""
        ...

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one moment to another; the device must have come to both."""
        ...

    def reached(self, moment: Any) -> bool:
        """Whether the device has come to a moment; does not wait."""
        ...

    def here(self) -> None:
        """What the calling thread queues from now on is for this device: CUDA's current device is a thread's own."""
        ...


class HostTimer:
    """Moments by the host's clock."""

    def now(self) -> float:
        """Now."""
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        """See `Timer.between`."""
        return end - start

    def reached(self, moment: float) -> bool:
        """See `Timer.reached`: a CPU is where its host is."""
        return True

    def here(self) -> None:
        """See `Timer.here`."""


class EventTimer:
    """Moments as CUDA events on the current stream. While a graph is captured there are none, since nothing runs: None
    stands for such a moment, and spans to and from it count nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        """An event behind all work that was queued so far."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """See `Timer.between`."""
        if start is None or end is None:
            return 0.0
        seconds: float = start.elapsed_time(end) / 1e3
        return seconds

    def reached(self, moment: Any) -> bool:
        """See `Timer.reached`."""
        return moment is None or bool(moment.query())

    def here(self) -> None:
        """See `Timer.here`."""
        if self._device.index is not None:  # else it is the current one of all threads
            torch.cuda.set_device(self._device)


HOST = HostTimer()


def timer_of(device: torch.device) -> Timer:
    """The timer of a device."""
    return EventTimer(device) if device.type == "cuda" else HOST


@dataclass(slots=True)
class Spans:
    """Spans of a device's work; `take` them when it has done all of it."""

    timer: Timer = HOST
    _spans: list[tuple[Timer, Any, Any]] = field(default_factory=list)
    _started: Any = None

    def __enter__(self) -> None:
        self._started = self.timer.now()

    def __exit__(self, *_: object) -> None:
        self.add(self.timer, self._started)

    def add(self, timer: Timer, started: Any) -> Any:
        """A span that began at a moment of `timer` and ends now; returns the moment of its end."""
        ended = timer.now()
        self._spans.append((timer, started, ended))
        return ended

    def split(self) -> "Spans":
        """The spans so far, as another object; starts again from none."""
        spans, self._spans = Spans(self.timer, self._spans), []
        return spans

    def take(self) -> float:
        """The seconds of all spans so far; starts again from none."""
        spans, self._spans = self._spans, []
        return sum(timer.between(start, end) for timer, start, end in spans)
