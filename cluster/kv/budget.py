"""Computes the number of KV pages of a rank, from the configured size or from the memory that is free after loading."""

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cluster.arch.resolve import ResolvedConfig
from cluster.config import ConfigError, EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.distributed.mesh import Mesh
from cluster.kv.free_memory import free_memory
from cluster.kv.pool_sizes import PoolSizes

CPU_FRACTION = 0.3  # on a CPU, KV takes this share of the memory that is free after loading, if no share is configured
GB = 1e9
# The reserve is the larger of two sizes: the first share of the measured workspace, and the second share of the
# device's memory. It stays free, because a later step may fragment the allocator's blocks more than the measured steps.
RESERVE_SHARES = 0.1, 0.01
# A configured size may use this share of the reserve. A user may configure the size that an earlier start has found;
# the next start must accept it, even if it measures slightly less free memory.
USABLE_RESERVE_SHARE = 0.5
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Capacity:
    """KV capacity of one rank in tokens, and a text that says which setting or limit determined it."""

    tokens: int
    sized_by: str


class MemoryBreakdown(NamedTuple):
    """Memory of a rank's device, in bytes: its `total`, what is `free` after loading, the `weights`, the measured
    `workspace` (what the largest steps take besides weights and KV), and an estimate for captured programs (`graphs`).
    """

    total: int
    free: int
    weights: int
    workspace: int
    graphs: int

    @property
    def reserve(self) -> int:
        """The reserve that stays free; see `RESERVE_SHARES`."""
        return int(max(RESERVE_SHARES[0] * self.workspace, RESERVE_SHARES[1] * self.total))

    @property
    def kv_bytes(self) -> int:
        """Bytes that remain for KV caches; negative if workspace, captured programs and reserve alone do not fit."""
        return self.free - self.workspace - self.graphs - self.reserve

    @property
    def description(self) -> str:
        """The breakdown of the device's memory as text, for messages."""
        graphs = f", captured programs {self.graphs / GB:.3f}" if self.graphs else ""
        return (
            f"of {self.total / GB:.3f} GB weights take {self.weights / GB:.3f}, others {self.other_bytes / GB:.3f}, "
            f"workspaces {self.workspace / GB:.3f}{graphs}, and {self.reserve / GB:.3f} stay spare"
        )

    @property
    def other_bytes(self) -> int:
        """Bytes used by anything but the weights: other processes, the driver, collectives."""
        return max(0, self.total - self.free - self.weights)


def kv_capacity(
    resolved: ResolvedConfig, mesh: Mesh, sizes: PoolSizes, breakdown: MemoryBreakdown | None = None
) -> Capacity:
    """Return the KV capacity of one rank, equal on every rank of the gang. Call it after all models are loaded.

    `sizes` are the bytes of tokens in the pools of all runners together. `breakdown` is given for a device with its own
    memory, and None on a CPU. The first of these rules that applies gives the capacity:

    1. `max_total_tokens`, if set.
    2. `kv_cache_gb`, if set.
    3. On a device with its own memory: `mem_fraction_static` of the device minus the weights, or, if it is not set,
       `breakdown.kv_bytes`; less one page. On a CPU: `mem_fraction_static` (by default `CPU_FRACTION`) of the free
       memory, divided among the ranks of the machine; the rank with the least memory decides for all.

    The capacities of rules 2 and 3 never exceed what all running requests need at full context. A capacity of 0 is
    possible; `page_count` refuses it.

    Raises:
        ConfigError: the system does not report its free memory, or the configured size does not fit on the device.
    """
    config = resolved.settings
    if breakdown is not None:
        return _device_capacity(resolved, breakdown, sizes)
    assert resolved.device != "cuda", "on a GPU the free memory must be measured first"
    if config.max_total_tokens is not None:
        return Capacity(config.max_total_tokens, "max_total_tokens")
    max_useful_tokens, max_reason = _max_useful_tokens(resolved)
    if config.kv_cache_gb is not None:
        tokens = sizes.tokens_in(int(config.kv_cache_gb * GB))
        return (
            Capacity(max_useful_tokens, max_reason)
            if tokens > max_useful_tokens
            else Capacity(tokens, f"kv_cache_gb {config.kv_cache_gb:g}")
        )
    machine_id = _machine_id()
    machine_ids = [row[0] for row in mesh.all_gather_row((machine_id,))]  # waits until every rank has loaded
    kv_bytes, explanation = _cpu_kv_bytes(config, machine_ids.count(machine_id))
    rank_tokens = sizes.tokens_in(kv_bytes)
    tokens = min(row[0] for row in mesh.all_gather_row((rank_tokens,)))
    if tokens >= max_useful_tokens:
        return Capacity(max_useful_tokens, max_reason)
    if tokens < rank_tokens:
        explanation = f"the rank with the least room; here {explanation}"
    return Capacity(tokens, explanation)


def _max_useful_tokens(resolved: ResolvedConfig) -> tuple[int, str]:
    """Return how many tokens all running requests need at full context, if each takes whole pages, and a text that says
    so.
    """
    page_size, requests = resolved.settings.page_size, resolved.settings.max_running_requests
    max_tokens = requests * -(-(resolved.context_length + resolved.shape.window) // page_size) * page_size
    return max_tokens, f"{requests} requests at the full context of {resolved.context_length} tokens need no more"


def _device_capacity(resolved: ResolvedConfig, breakdown: MemoryBreakdown, sizes: PoolSizes) -> Capacity:
    """Return the capacity on a device with its own memory. If the free memory or `mem_fraction_static` decides, one
    page is subtracted for the sink page (page 0, to which padding rows write).

    Raises:
        ConfigError: the configured size is larger than what is left; the message says which setting to lower, and to
            which value.
    """
    config, (max_useful_tokens, max_reason) = resolved.settings, _max_useful_tokens(resolved)
    available_tokens = sizes.tokens_in(breakdown.kv_bytes - sizes.page_bytes)
    # 1 % below `available_tokens`: the next start may find slightly less free memory.
    advised_tokens = available_tokens - -(-available_tokens // 100)
    allowed_tokens = sizes.tokens_in(
        int(breakdown.kv_bytes + USABLE_RESERVE_SHARE * breakdown.reserve) - sizes.page_bytes
    )
    if config.max_total_tokens is not None:
        if config.max_total_tokens > allowed_tokens:
            raise _too_large_error(
                breakdown,
                sizes,
                config.max_total_tokens,
                available_tokens,
                f"max_total_tokens to {advised_tokens}",
            )
        return Capacity(config.max_total_tokens, "max_total_tokens")
    explanation = f"what is left: {breakdown.description}"
    requested_tokens, remedy = available_tokens, ""
    if config.kv_cache_gb is not None:
        requested_tokens, explanation = (
            sizes.tokens_in(int(config.kv_cache_gb * GB)),
            f"kv_cache_gb {config.kv_cache_gb:g}",
        )
        remedy = f"kv_cache_gb to {int(sizes.bytes_of(advised_tokens) / GB * 1e4) / 1e4:g}"
    elif config.mem_fraction_static is not None:
        fraction = config.mem_fraction_static
        requested_tokens = sizes.tokens_in(int(fraction * breakdown.total - breakdown.weights) - sizes.page_bytes)
        explanation = (
            f"mem_fraction_static {fraction:g} of {breakdown.total / GB:.1f} GB less "
            f"{breakdown.weights / GB:.1f} GB of weights"
        )
        advised_bytes = breakdown.weights + sizes.bytes_of(advised_tokens) + sizes.page_bytes
        advised_fraction = int(advised_bytes / breakdown.total * 1e4) / 1e4
        remedy = f"mem_fraction_static to {advised_fraction:g}"
    if requested_tokens >= max_useful_tokens:
        requested_tokens, explanation = max_useful_tokens, max_reason
    if requested_tokens > allowed_tokens:
        raise _too_large_error(breakdown, sizes, requested_tokens, available_tokens, remedy)
    return Capacity(max(0, requested_tokens), explanation)


def _too_large_error(
    breakdown: MemoryBreakdown, sizes: PoolSizes, requested_tokens: int, available_tokens: int, remedy: str
) -> ConfigError:
    return ConfigError(
        f"a KV cache of {requested_tokens} tokens takes {sizes.bytes_of(requested_tokens) / GB:.3f} GB, and "
        f"{sizes.bytes_of(available_tokens) / GB:.3f} GB are left for it ({breakdown.description}): lower {remedy}, or "
        "lower max_running_requests or chunked_prefill_size"
    )


def page_count(resolved: ResolvedSettings, capacity: Capacity) -> int:
    """Return the number of KV pages of one rank, without the sink page.

    Raises:
        ConfigError: the pages do not hold one window and a prompt of one token.
    """
    page_size, window = resolved.settings.page_size, resolved.shape.window
    pages = capacity.tokens // page_size
    if pages * page_size <= window + 1:
        raise ConfigError(
            f"the KV cache gets {pages} pages of {page_size} tokens ({capacity.sized_by}), too few for a window "
            f"of {window} tokens and a prompt; raise max_total_tokens, kv_cache_gb or mem_fraction_static, or free "
            "memory"
        )
    return pages


def _cpu_kv_bytes(config: EngineConfig, ranks: int) -> tuple[int, str]:
    """Return the KV bytes of one of the `ranks` that share this machine's memory, and a text that explains them."""
    configured_fraction = config.mem_fraction_static
    source = "" if configured_fraction is not None else ", the default,"
    per_rank = f" for each of {ranks} ranks" if ranks > 1 else ""
    fraction, free_bytes = CPU_FRACTION if configured_fraction is None else configured_fraction, free_memory()
    kv_bytes = int(fraction * free_bytes) // ranks
    explanation = (
        f"mem_fraction_static {fraction:g}{source} of the {free_bytes / GB:.1f} GB free after loading: "
        f"{kv_bytes / GB:.2f} GB{per_rank}; {(1.0 - fraction) * free_bytes / GB:.1f} GB stay for workspaces and others"
    )
    return kv_bytes, explanation


def _machine_id() -> int:
    """Return a number that identifies this machine: all ranks on it get the same one.

    Two containers of one machine get the same number too, even if each has its own memory limit. A rank then takes only
    a share of the limit of its container: less than possible, never more.
    """
    try:
        machine_name = BOOT_ID.read_text().strip()
    except OSError:
        machine_name = platform.node()
    return int.from_bytes(hashlib.blake2b(machine_name.encode(), digest_size=7).digest(), "big")
