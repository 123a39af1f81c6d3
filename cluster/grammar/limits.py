"""What compiling one grammar may take: processor time and memory of the process that compiles it."""

import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MEMORY = 1 << 30  # bytes of address space that one grammar may take
STACK = 1 << 20  # bytes of stack: a rank compiles the grammar again, in a thread that may have as little as twice that
TOO_LARGE = "it is nested too deeply, or takes more than 1 GiB of memory to compile; make it shorter or simpler"
OWN_SHARE = 0.9  # of the time that passes; who gets less processor time than that waits for others


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Seconds of processor time, and seconds that passed meanwhile."""

    processor: float
    passed: float

    @property
    def on_a_busy_machine(self) -> bool:
        """Whether others took the processor: then processor time says less about the work, as caches are shared."""
        return self.processor < OWN_SHARE * self.passed


class Stopwatch:
    """Measures what this process spends, from now on."""

    def __init__(
        self, processor: Callable[[], float] = time.process_time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._processor, self._clock = processor, clock
        self._began = processor(), clock()

    def read(self) -> TimeSpent:
        """What was spent so far."""
        return TimeSpent(self._processor() - self._began[0], self._clock() - self._began[1])


def limit(seconds: float) -> None:
    """From now on, end this process by SIGPROF when it has taken `seconds` of processor time, its threads together and
    the system's work for it included, or when its main thread needs more than `STACK`; and refuse it more than `MEMORY`
    beyond what it has. Waiting costs nothing.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    taken = address_space()
    if taken:
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))


def no_more_limit() -> None:
    """Lift the limit of processor time."""
    signal.setitimer(signal.ITIMER_PROF, 0)


def address_space() -> int:
    """Bytes of address space that this process has taken; 0 where the system does not say."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[0]) * resource.getpagesize() if file.exists() else 0
