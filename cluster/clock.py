"""Progress counters of one rank: its collectives, the time it waits in them, the parts of layers it comes to."""

from dataclasses import dataclass, field
from typing import Any

from cluster.timing import HOST, Spans, Timer


@dataclass(slots=True)
class Clock:
    """Counts what this rank does; other threads may read the counts meanwhile.

    `begun` is the number of collectives entered and `calls` the number that returned (or, on a GPU, were queued);
    `parts` counts the parts of layers that a rank without peers has come to, where ranks with peers enter a collective.
    """

    calls: int = 0
    begun: int = 0
    parts: int = 0
    _waits: Spans = field(default_factory=Spans)

    @property
    def marks(self) -> int:
        """The sum of the counters, which grows with every sign of progress."""
        return self.calls + self.begun + self.parts

    @property
    def waits(self) -> bool:
        """Whether this rank is in a collective now."""
        return self.begun > self.calls

    def begin(self, timer: Timer = HOST) -> Any:
        """Note that a collective is entered; returns the moment, to be given to `end`."""
        self.begun += 1
        return timer.now()

    def end(self, began: Any, timer: Timer = HOST) -> None:
        """Note that the collective entered at `began` has returned."""
        self._waits.add(timer, began)
        self.calls += 1

    def replayed(self, count: int) -> None:
        """Note collectives that a captured program queued all at once."""
        self.begun += count
        self.calls += count

    def part(self) -> None:
        """Note that a part of a layer is reached."""
        self.parts += 1

    def split(self) -> Spans:
        """The spans spent in collectives since the last call, to be taken when the device has done all of them."""
        return self._waits.split()
