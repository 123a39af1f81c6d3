"""Limits on the processor time and memory of the process that compiles one grammar."""

import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MAX_MEMORY_BYTES = 1 << 30  # address space that compiling one grammar may take
MAX_STACK_BYTES = 1 << 20  # a rank compiles the grammar again, in a thread with a stack of perhaps only 2 MiB
TOO_LARGE = "it is nested too deeply, or takes more than 1 GiB of memory to compile; make it shorter or simpler"
# A process whose processor time is a smaller share of wall-clock time competes with other processes.
MIN_UNDISTURBED_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Processor time and wall-clock time of a piece of work, in seconds."""

    processor_s: float
    elapsed_s: float

    @property
    def machine_was_busy(self) -> bool:
        """Whether other processes seem to have used the processor too. The processor time is then less exact, because
        processes share caches.
        """
        return self.processor_s < MIN_UNDISTURBED_SHARE * self.elapsed_s


class Stopwatch:
    """Measures the processor time and wall-clock time of this process since the stopwatch was made."""

    def __init__(
        self, processor_time: Callable[[], float] = time.process_time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._processor, self._clock = processor_time, clock
        self._start = processor_time(), clock()

    def measure(self) -> TimeSpent:
        """Return the time spent so far."""
        return TimeSpent(self._processor() - self._start[0], self._clock() - self._start[1])


def set_limits(processor_s: float) -> None:
    """Limit the processor time, the stack and the address space of this process from now on.

    SIGPROF ends the process after `processor_s` of processor time, counting all threads and the kernel's work for them;
    waiting costs nothing. The main thread may use `MAX_STACK_BYTES` of stack. Allocations fail once the process uses
    `MAX_MEMORY_BYTES` more than at this call. Without /proc the address space is not limited.
    """
    signal.setitimer(signal.ITIMER_PROF, processor_s)
    resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    used_bytes = address_space_bytes()
    if used_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MAX_MEMORY_BYTES, resource.RLIM_INFINITY))


def remove_time_limit() -> None:
    """Remove the limit of processor time."""
    signal.setitimer(signal.ITIMER_PROF, 0)


def address_space_bytes() -> int:
    """Return the size of this process's address space in bytes; 0 where /proc does not report it."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[0]) * resource.getpagesize() if file.exists() else 0
