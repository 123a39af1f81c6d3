"""Free memory of this process: the least of the machine's available memory and what its cgroups' limits leave."""

from pathlib import Path

from cluster.config import ConfigError

# (controller in /proc/self/cgroup, mount points, limit file, usage file, memory.stat keys of reclaimable file cache)
V2 = ("", ("sys/fs/cgroup", "sys/fs/cgroup/unified"), "memory.max", "memory.current", ("active_file", "inactive_file"))
V1 = (
    "memory",
    ("sys/fs/cgroup/memory",),
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated now: the least of MemAvailable and, for each cgroup (v1 or v2) around this
    process, limit - usage + file cache. `root` is the folder that holds proc and sys.

    Raises:
        ConfigError: /proc/meminfo has no MemAvailable, or cannot be read.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, IndexError, ValueError):
        remedy = "set max_total_tokens or kv_cache_gb"
        raise ConfigError(f"/proc/meminfo does not tell how much memory is free; {remedy}") from None
    return max(0, min([available, *_available_by_cgroup(root)]))


def _available_by_cgroup(root: Path) -> list[int]:
    """Return limit - usage + file cache, in bytes, of every memory cgroup with a limit, from the cgroup of this process
    up to the top. The list is empty if there are no such cgroups.
    """
    try:
        entries = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    available_by_cgroup = []
    for _, controllers, path in (entry for entry in entries if len(entry) == 3):
        for name, mounts, limit, usage, cache in (V2, V1):
            if name not in controllers.split(","):
                continue
            for mount in mounts:
                # In a container the path may be the path on the host, which does not exist here. Then the top folder of
                # the mount is the cgroup of the container.
                process_folder = root / mount / path.strip("/")
                for folder in (process_folder, *process_folder.parents):
                    if folder.is_relative_to(root / mount):
                        available_bytes = _available_in_cgroup(folder, limit, usage, cache)
                        available_by_cgroup += [] if available_bytes is None else [available_bytes]
    return available_by_cgroup


def _available_in_cgroup(folder: Path, limit: str, usage: str, cache: tuple[str, ...]) -> int | None:
    try:
        limit_text, used_bytes = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        if limit_text == "max":
            return None
        stat = dict(line.split()[:2] for line in (folder / "memory.stat").read_text().splitlines())
        return int(limit_text) - used_bytes + sum(int(stat.get(name, 0)) for name in cache)
    except (OSError, ValueError):
        return None
