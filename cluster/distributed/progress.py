"""Progress counters of one rank: its collectives, the time spent in them, and the parts of layers that it reaches."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from cluster.device.timing import HOST_TIMER, Spans, Timer


@dataclass(slots=True)
class ProgressClock:
    """Counts the progress of this rank and its device. Other threads may read the counters.

    `collectives_entered` is the number of collectives entered; `collectives_returned` is the number of those that
    returned (on a GPU: that were queued). `layer_marks` counts the parts of layers that a rank without peers has
    reached: the places where ranks with peers enter a collective. On a GPU, `device_moments` counts the recorded
    moments (CUDA events) that the device has reached, and `waits_for_device` is True while the host only waits for the
    device.
    """

    collectives_returned: int = 0
    collectives_entered: int = 0
    layer_marks: int = 0
    device_moments: int = 0
    waits_for_device: bool = False
    device_timer: Timer = HOST_TIMER
    _collective_spans: Spans = field(default_factory=Spans)
    _pending_moments: deque[Any] = field(default_factory=deque)

    @property
    def progress_count(self) -> int:
        """The sum of all counters, which grows whenever one of them does."""
        return self.collectives_returned + self.collectives_entered + self.layer_marks + self.device_moments

    @property
    def is_waiting(self) -> bool:
        """Whether this rank is in a collective, or waits for its device."""
        return self.collectives_entered > self.collectives_returned or self.waits_for_device

    def begin(self, timer: Timer = HOST_TIMER) -> Any:
        """Record that a collective is entered. Return the present moment, for `end`."""
        self.collectives_entered += 1
        return self._record(timer.now(), timer)

    def end(self, entered_at: Any, timer: Timer = HOST_TIMER) -> None:
        """Record that the collective entered at `entered_at` has returned."""
        self._record(self._collective_spans.add(timer, entered_at), timer)
        self.collectives_returned += 1

    def count_replayed(self, count: int) -> None:
        """Note `count` collectives that the replay of a captured program queued."""
        self.collectives_entered += count
        self.collectives_returned += count

    def mark_layer(self) -> None:
        """Record that a rank without peers reaches a part of a layer."""
        self.layer_marks += 1
        self.mark()

    def mark(self) -> None:
        """On a GPU, record the present moment, which `poll_device` counts once the device has reached it."""
        if self.device_timer is not HOST_TIMER:
            self._record(self.device_timer.now(), self.device_timer)

    def poll_device(self) -> int:
        """Count the moments that the device has reached; return `device_moments`. Only the thread that queues the
        device's work may call this.
        """
        while self._pending_moments and self.device_timer.reached(self._pending_moments[0]):
            self._pending_moments.popleft()
            self.device_moments += 1
        return self.device_moments

    def _record(self, moment: Any, timer: Timer) -> Any:
        if timer is not HOST_TIMER:
            self._pending_moments.append(moment)
        return moment

    def take_collective_spans(self) -> Spans:
        """Return the time spans of the collectives since the last call. Call `Spans.take` on them only when the device
        has finished these collectives.
        """
        return self._collective_spans.split()
