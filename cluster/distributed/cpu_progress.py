"""CPU time of the threads of a computation: the sign of life of a long operation that reports no progress itself.

Only the computing thread and the threads that it started (torch's OpenMP team) count. Ray's threads answer heartbeats
and gloo's may poll for a peer: both use CPU time even in a rank that is stuck. On Linux a new thread has the name of
the thread that started it, until it is given another; so the computing thread takes a name before its first operation,
and all threads of that name count.
"""

import logging
import resource
import threading
import time
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)

TASKS = Path("/proc/self/task")


class CpuScope(Protocol):
    """Whose CPU time counts as progress."""

    def seconds(self) -> float:
        """CPU seconds so far."""
        ...


class Effort:
    """CPU seconds of the thread that called `begin` and of those that it started since; usable from any thread."""

    def __init__(self, name: str) -> None:
        """`name` is given to the threads: at most 15 characters, and no other thread of the process may have it."""
        self._name = name
        self._thread = ""
        self._known: dict[str, bool] = {}  # by task id: whether it is one of ours

    def begin(self) -> None:
        """The calling thread is the computing one from now on. If it cannot be renamed, only it counts."""
        self._thread, self._known = str(threading.get_native_id()), {}
        try:
            (TASKS / self._thread / "comm").write_text(self._name)
        except OSError as error:
            logger.warning("cannot name the computing thread: %s; threads that it starts do not count", error)

    def seconds(self) -> float:
        """CPU seconds so far; without /proc, where threads cannot be told apart, those of the whole process."""
        if not TASKS.is_dir():
            return time.process_time()
        tasks = [task.name for task in TASKS.iterdir()]
        self._known = {task: known for task in tasks if (known := self._is_own(task)) is not None}
        return sum(cpu_seconds(int(task)) for task, own in self._known.items() if own)

    def _is_own(self, task: str) -> bool | None:
        """Whether a thread is one of ours; None when it has ended."""
        if task == self._thread:  # before the cache is asked: it may have begun while another thread looked
            return True
        if task in self._known:
            return self._known[task]
        try:
            return (TASKS / task / "comm").read_text().strip() == self._name
        except OSError:
            return None


def cpu_seconds(thread: int) -> float:
    """CPU seconds of a thread of this process by its id; 0.0 when it has ended."""
    try:
        return time.clock_gettime(~thread << 3 | 6)  # clock_getcpuclockid(3): per thread, as the scheduler counts
    except OSError:
        return 0.0


def reads() -> int:
    """How often this process had to wait for a disk: major page faults plus block reads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_majflt + usage.ru_inblock


class Pulse:
    """The time of the last progress, as seen by repeated calls of `look`.

    Progress is a changed mark, or CPU time of at least a thousandth of the time since the last progress: that little,
    because the machine may be busy, but not 0, because a thread that waits with a time limit wakes up now and then.
    """

    SHARE = 0.001
    LEAST_S = 0.001

    def __init__(self, effort: CpuScope) -> None:
        self._effort = effort
        self._marks: object = None
        self._cpu_s = 0.0
        self._moved = self._marked = time.monotonic()

    def beat(self) -> None:
        """Note progress now."""
        self._moved = self._marked = time.monotonic()

    def look(self, marks: object, waits: bool = False) -> None:
        """Compare with the last look. If the rank `waits` for its peers, CPU time does not count."""
        now, cpu_s = time.monotonic(), self._effort.seconds()
        self._cpu_s = min(self._cpu_s, cpu_s)  # the seconds of a thread that ended are no longer in the sum
        if marks != self._marks:
            self._marks, self._cpu_s = marks, cpu_s
            self._moved = self._marked = now
        elif not waits and cpu_s - self._cpu_s >= max(self.LEAST_S, self.SHARE * (now - self._moved)):
            self._cpu_s, self._moved = cpu_s, now

    @property
    def age_s(self) -> float:
        """Seconds since the last progress of either kind."""
        return time.monotonic() - self._moved

    @property
    def unmarked_s(self) -> float:
        """Seconds since a mark changed, whatever CPU time was used."""
        return time.monotonic() - self._marked
