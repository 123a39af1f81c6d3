"""CPU time of the computing threads, as a sign of progress in a long operation that does not report its progress.

Only the computing thread and the threads that it started (torch's OpenMP team) count. Ray's threads answer heartbeats
and gloo's may poll for a peer: both use CPU time even in a rank that is stuck. On Linux a new thread inherits the name
of the thread that started it. So the computing thread is renamed before its first operation, and all threads of that
name count.
"""

import logging
import resource
import threading
import time
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)

TASKS = Path("/proc/self/task")


class CpuTimeSource(Protocol):
    """Threads whose CPU time counts as progress."""

    def seconds(self) -> float:
        """Return the CPU seconds so far."""


class ThreadCpuTime:
    """CPU seconds of the thread that called `use_current_thread` and of the threads it started since. Usable from any
    thread.
    """

    def __init__(self, name: str) -> None:
        """`name` becomes the threads' name: at most 15 characters, and unique to them in this process."""
        self._name = name
        self._thread = ""
        self._counted_by_task: dict[str, bool] = {}  # by task id: whether the thread counts

    def use_current_thread(self) -> None:
        """Make the calling thread the computing one. If it cannot be renamed, threads that it starts do not count."""
        self._thread, self._counted_by_task = str(threading.get_native_id()), {}
        try:
            (TASKS / self._thread / "comm").write_text(self._name)
        except OSError as error:
            logger.warning("cannot name the computing thread: %s; threads that it starts do not count", error)

    def seconds(self) -> float:
        """Return the CPU seconds so far; without /proc, those of the whole process."""
        if not TASKS.is_dir():
            return time.process_time()
        tasks = [task.name for task in TASKS.iterdir()]
        self._counted_by_task = {task: counted for task in tasks if (counted := self._is_own(task)) is not None}
        return sum(cpu_seconds(int(task)) for task, counts in self._counted_by_task.items() if counts)

    def _is_own(self, task: str) -> bool | None:
        """Return whether a thread counts; None if it has ended."""
        # The cached answer for this thread may be from before it called `use_current_thread`.
        if task == self._thread:
            return True
        if task in self._counted_by_task:
            return self._counted_by_task[task]
        try:
            return (TASKS / task / "comm").read_text().strip() == self._name
        except OSError:
            return None


def cpu_seconds(thread: int) -> float:
    """Return the CPU seconds of a thread of this process by its id; 0.0 if it has ended."""
    try:
        # The clock id of one thread, clock_getcpuclockid(3): (~tid << 3) | 4 (per thread) | 2 (scheduler's time).
        return time.clock_gettime(~thread << 3 | 6)
    except OSError:
        return 0.0


def disk_waits() -> int:
    """Return how often this process waited for a disk: major page faults plus block reads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_majflt + usage.ru_inblock


class ProgressTracker:
    """Tracks the time of the last progress, by repeated calls of `update`.

    Progress means that the value `marks` has changed, or that the threads used enough CPU time: at least `MIN_CPU_S`
    seconds, and at least the share `MIN_CPU_SHARE` of the time since the last progress. The share is small because the
    machine may be busy. It is not 0 because a thread that waits with a timeout wakes up at times.
    """

    MIN_CPU_SHARE = 0.001
    MIN_CPU_S = 0.001

    def __init__(self, cpu_time: CpuTimeSource) -> None:
        self._cpu_time = cpu_time
        self._marks: object = None
        self._cpu_s = 0.0
        self._last_progress_at = self._last_mark_at = time.monotonic()

    def note_progress(self) -> None:
        """Record that the rank makes progress at this moment."""
        self._last_progress_at = self._last_mark_at = time.monotonic()

    def update(self, marks: object, waits: bool = False) -> None:
        """Record whether the rank has made progress since the last call. `marks` is any value that changes with the
        progress of the rank, such as a tuple of counters. If the rank `waits` for its peers, CPU time does not count.
        """
        now, cpu_s = time.monotonic(), self._cpu_time.seconds()
        self._cpu_s = min(self._cpu_s, cpu_s)  # the sum shrinks when a thread ends
        if marks != self._marks:
            self._marks, self._cpu_s = marks, cpu_s
            self._last_progress_at = self._last_mark_at = now
        elif not waits and cpu_s - self._cpu_s >= max(
            self.MIN_CPU_S, self.MIN_CPU_SHARE * (now - self._last_progress_at)
        ):
            self._cpu_s, self._last_progress_at = cpu_s, now

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress that `update` or `note_progress` recorded."""
        return time.monotonic() - self._last_progress_at

    @property
    def since_mark_s(self) -> float:
        """Seconds since `marks` last changed; CPU time does not count."""
        return time.monotonic() - self._last_mark_at
