"""What a rank does, counted as it does it. Collectives are numbers and times here, whatever they do."""

import time
from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """What this rank does, counted as it does it; another thread may read along.

    `seconds` were spent waiting in collectives, `begun` of them were entered and `calls` are over; `parts` counts the
    parts of layers that a rank without peers has come to, where others have a collective.
    """

    seconds: float = 0.0
    calls: int = 0
    begun: int = 0
    parts: int = 0

    @property
    def marks(self) -> int:
        """A number that grows with everything that is done."""
        return self.calls + self.begun + self.parts

    @property
    def waits(self) -> bool:
        """Whether this rank is in a collective now."""
        return self.begun > self.calls

    def begin(self) -> float:
        """A collective is entered; the time now, for `end`."""
        self.begun += 1
        return time.perf_counter()

    def end(self, began: float) -> None:
        """The collective entered at `began` is over."""
        self.seconds += time.perf_counter() - began
        self.calls += 1

    def take(self) -> float:
        """The seconds so far, which start again from zero."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
