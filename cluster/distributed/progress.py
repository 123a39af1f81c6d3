"""Progress counters of one rank: its collectives, the time it waits in them, the parts of layers it comes to."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from cluster.device.timing import HOST, Spans, Timer


@dataclass(slots=True)
class ProgressClock:
    """Counts what this rank and its device do; other threads may read the counts meanwhile.

    `begun` is the number of collectives entered and `calls` the number that returned (or, on a GPU, were queued);
    `parts` counts the parts of layers that a rank without peers has come to, where ranks with peers enter a collective.
    Where the `device` runs behind its host, `passed` counts those of its moments to which it was seen to have come, and
    `awaiting` says that the host does nothing but wait for it.
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
        """The sum of the counters, which grows with every sign of progress."""
        return self.calls + self.begun + self.parts + self.passed

    @property
    def waits(self) -> bool:
        """Whether this rank is in a collective now, or waits for its device."""
        return self.begun > self.calls or self.awaiting

    def begin(self, timer: Timer = HOST) -> Any:
        """Note that a collective is entered; returns the moment, to be given to `end`."""
        self.begun += 1
        return self._noted(timer.now(), timer)

    def end(self, began: Any, timer: Timer = HOST) -> None:
        """Note that the collective entered at `began` has returned."""
        self._noted(self._waits.add(timer, began), timer)
        self.calls += 1

    def replayed(self, count: int) -> None:
        """Note collectives that a captured program queued all at once."""
        self.begun += count
        self.calls += count

    def part(self) -> None:
        """Note that a part of a layer is reached."""
        self.parts += 1
        self.mark()

    def mark(self) -> None:
        """Have `look` tell when the device has come to this point of its work."""
        if self.device is not HOST:
            self._noted(self.device.now(), self.device)

    def look(self) -> int:
        """See how far the device is; returns `passed`. For the thread that queues its work."""
        while self._ahead and self.device.reached(self._ahead[0]):
            self._ahead.popleft()
            self.passed += 1
        return self.passed

    def _noted(self, moment: Any, timer: Timer) -> Any:
        if timer is not HOST:
            self._ahead.append(moment)
        return moment

    def split(self) -> Spans:
        """The spans spent in collectives since the last call, to be taken when the device has done all of them."""
        return self._waits.split()
