"""How much memory this process may still use on this machine: the machine's own, and what its cgroups leave of it."""

from pathlib import Path

from cluster.config import ConfigError

# (controllers in /proc/self/cgroup, where they are mounted, limit, usage, what of the usage is reclaimable file cache)
V2 = ("", ("sys/fs/cgroup", "sys/fs/cgroup/unified"), "memory.max", "memory.current", ("active_file", "inactive_file"))
V1 = (
    "memory",
    ("sys/fs/cgroup/memory",),
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken now: the least of the machine's MemAvailable and of what each cgroup around this process
    has left of its limit (v1 and v2), file cache not counted as used. `root` is where /proc and /sys are.

    Raises:
        ConfigError: /proc/meminfo does not tell.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, IndexError, ValueError):
        remedy = "set max_total_tokens or kv_cache_gb"
        raise ConfigError(f"/proc/meminfo does not tell how much memory is free; {remedy}") from None
    return max(0, min([available, *_left_by_cgroups(root)]))


def _left_by_cgroups(root: Path) -> list[int]:
    """Limit minus usage of every memory cgroup from this process's own up to the top, where there is a limit."""
    try:
        entries = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in (entry for entry in entries if len(entry) == 3):
        for name, mounts, limit, usage, cache in (V2, V1):
            if name not in controllers.split(","):
                continue
            for mount in mounts:
                # In a container the path may be the host's, not mounted here; the mount's top is then its own cgroup.
                own = root / mount / path.strip("/")
                for folder in (own, *own.parents):
                    if folder.is_relative_to(root / mount):
                        left = _left(folder, limit, usage, cache)
                        found += [] if left is None else [left]
    return found


def _left(folder: Path, limit: str, usage: str, cache: tuple[str, ...]) -> int | None:
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        if most == "max":
            return None
        stat = dict(line.split()[:2] for line in (folder / "memory.stat").read_text().splitlines())
        return int(most) - used + sum(int(stat.get(name, 0)) for name in cache)
    except (OSError, ValueError):
        return None
