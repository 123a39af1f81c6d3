"""Progress counters of one rank: its collectives, the time spent in them, and the parts of layers that it reaches."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from cluster.device.timing import HOST, Spans, Timer


@dataclass(slots=True)
class ProgressClock:
    """Counts the progress of this rank and its device. Other threads may read the counters.

    `begun` is the number of collectives entered; `calls` is the number that returned (on a GPU: were queued). `parts`
    counts the parts of layers that a rank without peers has reached: the places where ranks with peers enter a
    collective. On a GPU, `passed` counts the recorded moments that the device has reached, and `awaiting` is True while
    the host only waits for the device.
    """

    calls: int = 0
    begun: int = 0
    parts: int = 0
    passed: int = 0
    awaiting: bool = False
    device: Timer = HOST
    _waits: Spans = field(default_factory=Spans)
    _ahead: deque[Any] = field(default_factory=deque)

    @property
    def marks(self) -> int:
        """The sum of all counters; it grows with every progress."""
        return self.calls + self.begun + self.parts + self.passed

    @property
    def waits(self) -> bool:
        """Whether this rank is in a collective, or waits for its device."""
        return self.begun > self.calls or self.awaiting

    def begin(self, timer: Timer = HOST) -> Any:
        """Note that a collective is entered; return the moment, for `end`."""
        self.begun += 1
        return self._noted(timer.now(), timer)

    def end(self, began: Any, timer: Timer = HOST) -> None:
        """Note that the collective entered at `began` has returned."""
        self._noted(self._waits.add(timer, began), timer)
        self.calls += 1

    def replayed(self, count: int) -> None:
        """Note `count` collectives that the replay of a captured program queued."""
        self.begun += count
        self.calls += count

    def part(self) -> None:
        """Note that a rank without peers reaches a part of a layer."""
        self.parts += 1
        self.mark()

    def mark(self) -> None:
        """Record a moment here, which `look` counts once the device has reached it."""
        if self.device is not HOST:
            self._noted(self.device.now(), self.device)

    def look(self) -> int:
        """Count the moments that the device has reached; return `passed`. Only for the thread that queues its work."""
        while self._ahead and self.device.reached(self._ahead[0]):
            self._ahead.popleft()
            self.passed += 1
        return self.passed

    def _noted(self, moment: Any, timer: Timer) -> Any:
        if timer is not HOST:
            self._ahead.append(moment)
        return moment

    def split(self) -> Spans:
        """Return the spans spent in collectives since the last call; `take` them once the device has finished them."""
        return self._waits.split()
