"""What the threads of a computation cost the CPU: the sign of life of a long operation that says nothing of itself.

Only the thread that computes and the threads that it started count (torch's OpenMP team). Ray's threads answer the
heartbeats that ask, and gloo's may poll for a peer: both are busy in a rank that is stuck. A thread on Linux has the
name of the one that started it, until it is given another; so the computing thread takes a name before its first
operation, and its own are those of that name.
"""

import logging
import resource
import threading
import time
from pathlib import Path

logger = logging.getLogger(__name__)

TASKS = Path("/proc/self/task")


class Effort:
    """CPU seconds of the thread that called `begin` and of those that it started since; any thread may ask."""

    def __init__(self, name: str) -> None:
        """`name` is that of the threads, at most 15 characters; no other thread of the process may have it."""
        self._name = name
        self._thread = ""
        self._known: dict[str, bool] = {}  # by task id: whether it is one of ours

    def begin(self) -> None:
        """The calling thread computes from now on. Where it may not take a name, it alone counts."""
        self._thread, self._known = str(threading.get_native_id()), {}
        try:
            (TASKS / self._thread / "comm").write_text(self._name)
        except OSError as error:
            logger.warning("threads that compute cannot be told from others: %s; only one of them counts", error)

    def seconds(self) -> float:
        """CPU seconds so far. Where the system does not tell threads apart (no /proc), those of the whole process."""
        if not TASKS.is_dir():
            return time.process_time()
        tasks = [task.name for task in TASKS.iterdir()]
        self._known = {task: known for task in tasks if (known := self._is_own(task)) is not None}
        return sum(_cpu_seconds(int(task)) for task, own in self._known.items() if own)

    def _is_own(self, task: str) -> bool | None:
        """Whether a thread is one of ours; None when it has ended."""
        if task == self._thread:  # whatever is known: it may have begun while another thread looked
            return True
        if task in self._known:
            return self._known[task]
        try:
            return (TASKS / task / "comm").read_text().strip() == self._name
        except OSError:
            return None


def _cpu_seconds(thread: int) -> float:
    """CPU seconds of a thread of this process by its id; 0.0 when it has ended."""
    try:
        return time.clock_gettime(~thread << 3 | 6)  # clock_getcpuclockid(3): per thread, as the scheduler counts
    except OSError:
        return 0.0


def reads() -> int:
    """How often this process had to wait for a disk: pages of files that were not in memory, and blocks."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_majflt + usage.ru_inblock


class Pulse:
    """When something was last done, as seen by whoever looks in between.

    Done is: a mark that changed, or CPU time, of which a thousandth of the time since counts (a machine that others
    keep busy gives little, and a thread that only waits with a time limit wakes up now and then).
    """

    SHARE = 0.001
    LEAST_S = 0.001

    def __init__(self, effort: Effort) -> None:
        self._effort = effort
        self._marks: object = None
        self._cpu_s = 0.0
        self._moved = self._marked = time.monotonic()

    def beat(self) -> None:
        """Something was done just now."""
        self._moved = self._marked = time.monotonic()

    def look(self, marks: object, waits: bool = False) -> None:
        """Compare with the last look. CPU time does not count while the rank waits for others."""
        now, cpu_s = time.monotonic(), self._effort.seconds()
        self._cpu_s = min(self._cpu_s, cpu_s)  # a thread that ended takes its seconds with it
        if marks != self._marks:
            self._marks, self._cpu_s = marks, cpu_s
            self._moved = self._marked = now
        elif not waits and cpu_s - self._cpu_s >= max(self.LEAST_S, self.SHARE * (now - self._moved)):
            self._cpu_s, self._moved = cpu_s, now

    @property
    def age_s(self) -> float:
        """Seconds since anything was done."""
        return time.monotonic() - self._moved

    @property
    def unmarked_s(self) -> float:
        """Seconds since a mark changed, whatever the CPU did."""
        return time.monotonic() - self._marked
