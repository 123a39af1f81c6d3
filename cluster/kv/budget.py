"""The number of KV pages of a rank: from the configured size, or from the memory that is free after loading models."""

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from cluster.config import ConfigError, EngineConfig
from cluster.distributed.mesh import Mesh
from cluster.kv.free_memory import free_memory

CPU_FRACTION = 0.3  # default share for KV of the memory that is free on a CPU after loading
GB = 1e9
# Reserve, as shares of the measured workspace and of the device: a later step may fragment the allocator's blocks more.
SPARE = 0.1, 0.01
# Share of the reserve that a configured size may use. A start that is configured with the size which an earlier start
# found must pass, although the later start may measure slightly less free memory.
RESTART = 0.5
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Capacity:
    """KV capacity of one rank in tokens, and a text that says which setting or limit determined it."""

    tokens: int
    sized_by: str


class Needs(NamedTuple):
    """Memory of a rank's device, in bytes: its `total`, what is `free` after loading, the `weights`, the measured
    `workspace` of the largest steps, and the memory of captured programs (`graphs`).
    """

    total: int
    free: int
    weights: int
    workspace: int
    graphs: int

    @property
    def spare(self) -> int:
        """The reserve that stays free; see `SPARE`."""
        return int(max(SPARE[0] * self.workspace, SPARE[1] * self.total))

    @property
    def left(self) -> int:
        """Bytes left for KV caches; negative if workspace, captured programs and reserve alone do not fit."""
        return self.free - self.workspace - self.graphs - self.spare

    @property
    def about(self) -> str:
        """The breakdown of the device's memory as text, for messages."""
        graphs = f", captured programs {self.graphs / GB:.3f}" if self.graphs else ""
        return (
            f"of {self.total / GB:.3f} GB weights take {self.weights / GB:.3f}, others {self.others / GB:.3f}, "
            f"workspaces {self.workspace / GB:.3f}{graphs}, and {self.spare / GB:.3f} stay spare"
        )

    @property
    def others(self) -> int:
        """Bytes used by anything but the weights: other processes, the driver, collectives."""
        return max(0, self.total - self.free - self.weights)


def kv_capacity(
    config: EngineConfig,
    mesh: Mesh,
    device: torch.device,
    token_bytes: int,
    context_length: int,
    window: int,
    needs: Needs | None = None,
) -> Capacity:
    """Return the KV capacity of one rank, equal on every rank of the gang. Call it after all models are loaded.

    `token_bytes` are the bytes of one token in the pools of all runners together. `needs` is given for a device with
    its own memory, and None on a CPU. In order of precedence, the capacity is:

    1. `max_total_tokens`, if set.
    2. `kv_cache_gb`, if set.
    3. On a device with its own memory: `mem_fraction_static` of the device minus the weights; if it is not set,
       `needs.left`. On a CPU: `mem_fraction_static` of the free memory, divided among the ranks of the machine; the
       rank with the least memory decides for all.

    Capacities 2 and 3 never exceed what all running requests need at full context. A capacity of 0 is possible;
    `page_count` refuses it.

    Raises:
        ConfigError: the system does not report its free memory, or the configured size does not fit on the device.
    """
    if needs is not None:
        return _of_device(config, needs, token_bytes, context_length, window)
    assert device.type != "cuda", "what a device has left is measured"
    if config.max_total_tokens is not None:
        return Capacity(config.max_total_tokens, "max_total_tokens")
    most, enough = _most(config, context_length, window)
    if config.kv_cache_gb is not None:
        tokens = int(config.kv_cache_gb * GB) // token_bytes
        return Capacity(most, enough) if tokens > most else Capacity(tokens, f"kv_cache_gb {config.kv_cache_gb:g}")
    place = _place()
    places = [row[0] for row in mesh.all_gather_row((place,))]  # waits until every rank has loaded
    room, words = _room(config, places.count(place))
    own = max(0, room) // token_bytes
    tokens = min(row[0] for row in mesh.all_gather_row((own,)))
    if tokens >= most:
        return Capacity(most, enough)
    if tokens < own:
        words = f"the rank with the least room; here {words}"
    return Capacity(tokens, words)


def _most(config: EngineConfig, context_length: int, window: int) -> tuple[int, str]:
    """Return the tokens of all running requests at full context, each in whole pages, and a text about them."""
    size, requests = config.page_size, config.max_running_requests
    most = requests * -(-(context_length + window) // size) * size
    return most, f"{requests} requests at the full context of {context_length} tokens need no more"


def _of_device(config: EngineConfig, needs: Needs, token_bytes: int, context_length: int, window: int) -> Capacity:
    """Return the capacity on a device with its own memory. One page is subtracted for the sink page.

    Raises:
        ConfigError: the configured size is larger than what is left; the message says which setting to lower, and to
            which value.
    """
    most, enough = _most(config, context_length, window)
    left = max(0, needs.left // token_bytes - config.page_size)
    sure = left - -(-left // 100)  # size to advise, 1 % below `left`: the next start may find slightly less free memory
    fits = max(0, int(needs.left + RESTART * needs.spare) // token_bytes - config.page_size)
    if config.max_total_tokens is not None:
        if config.max_total_tokens > fits:
            raise _too_much(needs, token_bytes, config.max_total_tokens, left, f"max_total_tokens to {sure}")
        return Capacity(config.max_total_tokens, "max_total_tokens")
    words = f"what is left: {needs.about}"
    asked, remedy = left, ""
    if config.kv_cache_gb is not None:
        asked, words = int(config.kv_cache_gb * GB) // token_bytes, f"kv_cache_gb {config.kv_cache_gb:g}"
        remedy = f"kv_cache_gb to {int(sure * token_bytes / GB * 1e4) / 1e4:g}"
    elif config.mem_fraction_static is not None:
        fraction = config.mem_fraction_static
        asked = int(fraction * needs.total - needs.weights) // token_bytes - config.page_size
        words = (
            f"mem_fraction_static {fraction:g} of {needs.total / GB:.1f} GB less {needs.weights / GB:.1f} GB of weights"
        )
        lower = int((needs.weights + (sure + config.page_size) * token_bytes) / needs.total * 1e4) / 1e4
        remedy = f"mem_fraction_static to {lower:g}"
    if asked >= most:
        asked, words = most, enough
    if asked > fits:
        raise _too_much(needs, token_bytes, asked, left, remedy)
    return Capacity(max(0, asked), words)


def _too_much(needs: Needs, token_bytes: int, asked: int, left: int, remedy: str) -> ConfigError:
    return ConfigError(
        f"a KV cache of {asked} tokens takes {asked * token_bytes / GB:.3f} GB, and {left * token_bytes / GB:.3f} GB "
        f"are left for it ({needs.about}): lower {remedy}, or lower max_running_requests or chunked_prefill_size"
    )


def page_count(config: EngineConfig, capacity: Capacity, window: int) -> int:
    """Return the number of KV pages of one rank, without the sink page.

    Raises:
        ConfigError: the pages do not hold one window and a prompt of one token.
    """
    pages = capacity.tokens // config.page_size
    if pages * config.page_size <= window + 1:
        raise ConfigError(
            f"the KV cache gets {pages} pages of {config.page_size} tokens ({capacity.sized_by}), too few for a window "
            f"of {window} tokens and a prompt; raise max_total_tokens, kv_cache_gb or mem_fraction_static, or free "
            "memory"
        )
    return pages


def _room(config: EngineConfig, ranks: int) -> tuple[int, str]:
    """Return the KV bytes of one of the `ranks` that share this machine's memory, and a text that explains them."""
    given = config.mem_fraction_static
    source = "" if given is not None else ", the default,"
    among = f" for each of {ranks} ranks" if ranks > 1 else ""
    fraction, free = CPU_FRACTION if given is None else given, free_memory()
    room = int(fraction * free) // ranks
    words = (
        f"mem_fraction_static {fraction:g}{source} of the {free / GB:.1f} GB free after loading: {room / GB:.2f} "
        f"GB{among}; {(1.0 - fraction) * free / GB:.1f} GB stay for workspaces and others"
    )
    return room, words


def _place() -> int:
    """Return a number that identifies this machine: all ranks on it get the same one.

    Two containers of one machine get the same number too, even if each has its own memory limit. A rank then takes only
    a share of the limit of its container: less than possible, never more.
    """
    try:
        machine = BOOT_ID.read_text().strip()
    except OSError:
        machine = platform.node()
    return int.from_bytes(hashlib.blake2b(machine.encode(), digest_size=7).digest(), "big")
