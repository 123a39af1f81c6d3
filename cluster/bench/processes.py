"""Read from /proc which descendants of a process are alive and how much memory they use, and kill processes."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
KIB, MIB = 1024, 1024 * 1024


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One process. `start_ticks` (since boot) distinguishes the process from a later one with the same pid."""

    pid: int
    start_ticks: int
    name: str = field(compare=False)  # a process may rename itself


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of `processes` processes: the sum of their RSS, and of their PSS, which splits a page among its users."""

    processes: int
    resident_mib: float
    proportional_mib: float


def process_tree(pid: int) -> list[ProcessEntry]:
    """Return the process and all its live descendants, or [] if the process is not alive. Zombies are not alive."""
    children: dict[int, list[ProcessEntry]] = {}
    processes = []
    for folder in PROC.iterdir():
        if not folder.name.isdigit() or (stat := _stat(int(folder.name))) is None:
            continue
        process, parent = stat
        children.setdefault(parent, []).append(process)
        if process.pid == pid:
            processes.append(process)
    for process in processes:  # the list grows while it is iterated: breadth first over the descendants
        processes.extend(children.get(process.pid, []))
    return processes


def memory_usage(processes: Iterable[ProcessEntry]) -> Memory:
    """Return the memory that the processes use now. Processes that have ended or may not be read are left out."""
    count, resident, proportional = 0, 0, 0
    for process in processes:
        try:
            lines = (PROC / str(process.pid) / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:] if line.endswith("kB")}
        count += 1
        resident += sizes.get("Rss", 0)
        proportional += sizes.get("Pss", 0)
    return Memory(count, resident * KIB / MIB, proportional * KIB / MIB)


def still_alive(processes: Iterable[ProcessEntry]) -> list[ProcessEntry]:
    """Return the processes that are still alive."""
    return [process for process in processes if (current := _stat(process.pid)) is not None and current[0] == process]


def wait_or_kill(processes: Iterable[ProcessEntry], timeout_s: float) -> list[ProcessEntry]:
    """Wait up to `timeout_s` for the processes to end, kill the rest, and return the killed processes."""
    remaining = still_alive(processes)
    deadline = time.monotonic() + timeout_s
    while remaining and time.monotonic() < deadline:
        time.sleep(0.05)
        remaining = still_alive(remaining)
    for process in remaining:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return remaining


def _stat(pid: int) -> tuple[ProcessEntry, int] | None:
    """Return a live process and its parent's pid, or None if the process has ended or is a zombie."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    if name.startswith("ray::"):  # Ray's name of a worker is in its command line; /proc/PID/stat has only 15 characters
        name = _command_name(pid) or name
    if fields[0] in "ZX":
        return None
    return ProcessEntry(pid, int(fields[19]), name), int(fields[1])


def _command_name(pid: int) -> str:
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").split(b" ")[0].decode(errors="replace")
    return ""
