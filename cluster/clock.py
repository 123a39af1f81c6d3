"""Progress counters of one rank: its collectives, the time it waits in them, the parts of layers it comes to."""

import time
from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """Counts what this rank does; other threads may read it meanwhile.

    `seconds` is the time spent in collectives, `begun` the number entered and `calls` the number that returned; `parts`
    counts the parts of layers that a rank without peers has come to, where ranks with peers enter a collective.
    """

    seconds: float = 0.0
    calls: int = 0
    begun: int = 0
    parts: int = 0

    @property
    def marks(self) -> int:
        """The sum of the counters, which grows with every sign of progress."""
        return self.calls + self.begun + self.parts

    @property
    def waits(self) -> bool:
        """Whether this rank is in a collective now."""
        return self.begun > self.calls

    def begin(self) -> float:
        """Note that a collective is entered; returns the time now, to be given to `end`."""
        self.begun += 1
        return time.perf_counter()

    def end(self, began: float) -> None:
        """Note that the collective entered at `began` has returned."""
        self.seconds += time.perf_counter() - began
        self.calls += 1

    def part(self) -> None:
        """Note that a part of a layer is reached."""
        self.parts += 1

    def take(self) -> float:
        """Return `seconds`, and set it back to zero."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
