"""Limits on the processor time and memory of the process that compiles one grammar."""

import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MEMORY = 1 << 30  # bytes of address space that compiling one grammar may take
STACK = 1 << 20  # bytes of stack. A rank compiles the grammar again, in a thread with a stack of perhaps only 2 MiB
TOO_LARGE = "it is nested too deeply, or takes more than 1 GiB of memory to compile; make it shorter or simpler"
OWN_SHARE = 0.9  # a process whose processor time is a smaller share of wall-clock time competes with other processes


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Processor time and wall-clock time of a piece of work, in seconds."""

    processor: float
    passed: float

    @property
    def on_a_busy_machine(self) -> bool:
        """Whether other processes used the processor too. Processor time is then less exact, because caches are
        shared.
        """
        return self.processor < OWN_SHARE * self.passed


class Stopwatch:
    """Measures the processor time and wall-clock time of this process since the stopwatch was made."""

    def __init__(
        self, processor: Callable[[], float] = time.process_time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._processor, self._clock = processor, clock
        self._began = processor(), clock()

    def read(self) -> TimeSpent:
        """Return the time spent so far."""
        return TimeSpent(self._processor() - self._began[0], self._clock() - self._began[1])


def limit(seconds: float) -> None:
    """Limit the processor time, the stack and the address space of this process from now on.

    SIGPROF ends the process after `seconds` of processor time, counting all threads and the kernel's work for them;
    waiting costs nothing. The main thread may use `STACK` bytes of stack. Allocations fail once the process has taken
    `MEMORY` bytes more than it has now.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    taken = address_space()
    if taken:
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))


def no_more_limit() -> None:
    """Remove the limit of processor time."""
    signal.setitimer(signal.ITIMER_PROF, 0)


def address_space() -> int:
    """Return the size of this process's address space in bytes; 0 where /proc does not report it."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[0]) * resource.getpagesize() if file.exists() else 0
