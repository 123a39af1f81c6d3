"""How many KV pages a rank gets: for the number of tokens that is set, or for the memory that its models leave."""

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.config import ConfigError, EngineConfig
from cluster.kv.free_memory import free_memory
from cluster.mesh import Mesh

CUDA_FRACTION = 0.85  # of the device, for weights and KV together; what is left is for workspaces (SGLang's meaning)
CPU_FRACTION = 0.3  # of the memory that is free once the models are loaded, for KV
GB = 1e9
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Capacity:
    """KV capacity of one rank in tokens, and in words what determined it."""

    tokens: int
    sized_by: str


def kv_capacity(
    config: EngineConfig, mesh: Mesh, device: torch.device, token_bytes: int, context_length: int, window: int
) -> Capacity:
    """The KV capacity of one rank, the same on every rank of the gang; called when all models are loaded.

    `token_bytes` is what one token takes in the pools of all runners together. If neither `max_total_tokens` nor
    `kv_cache_gb` is set, `mem_fraction_static` decides: on CUDA `free - (1 - fraction) * total` of the device, on a CPU
    that fraction of the memory that this process may still use, divided by the ranks that share it. The rank with the
    least decides for all; it is never more than all running requests at full context could use. It may be 0, which
    `page_count` refuses.

    Raises:
        ConfigError: the system does not tell how much memory is free.
    """
    if config.max_total_tokens is not None:
        return Capacity(config.max_total_tokens, "max_total_tokens")
    size = config.page_size
    most = config.max_running_requests * -(-(context_length + window) // size) * size  # whole pages each
    enough = f"{config.max_running_requests} requests at the full context of {context_length} tokens need no more"
    if config.kv_cache_gb is not None:
        tokens = int(config.kv_cache_gb * GB) // token_bytes
        return Capacity(most, enough) if tokens > most else Capacity(tokens, f"kv_cache_gb {config.kv_cache_gb:g}")
    place = _place(device)
    places = [row[0] for row in mesh.all_gather_row((place,))]  # waits until every rank has loaded
    room, words = _room(config, device, places.count(place))
    own = max(0, room) // token_bytes
    tokens = min(row[0] for row in mesh.all_gather_row((own,)))
    if tokens >= most:
        return Capacity(most, enough)
    if tokens < own:
        words = f"the rank with the least room; here {words}"
    return Capacity(tokens, words)


def page_count(config: EngineConfig, capacity: Capacity, window: int) -> int:
    """Pages of one rank, the sink not counted.

    Raises:
        ConfigError: not even a short request would fit.
    """
    pages = capacity.tokens // config.page_size
    if pages * config.page_size <= window + 1:
        raise ConfigError(
            f"the KV cache gets {pages} pages of {config.page_size} tokens ({capacity.sized_by}), too few for a window "
            f"of {window} tokens and a prompt; raise max_total_tokens, kv_cache_gb or mem_fraction_static, or free "
            "memory"
        )
    return pages


def _room(config: EngineConfig, device: torch.device, ranks: int) -> tuple[int, str]:
    """Bytes for the KV of one of the `ranks` that share a machine's memory or a device, and in words their source."""
    given = config.mem_fraction_static
    source = "" if given is not None else ", the default,"
    among = f" for each of {ranks} ranks" if ranks > 1 else ""
    if device.type == "cuda":
        fraction = CUDA_FRACTION if given is None else given
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        room = int(free - (1.0 - fraction) * total) // ranks
        words = (
            f"mem_fraction_static {fraction:g}{source} of {total / GB:.1f} GB less {(total - free) / GB:.1f} GB in use "
            f"after loading: {max(0, room) / GB:.2f} GB{among}; {(1.0 - fraction) * total / GB:.1f} GB stay for "
            "workspaces"
        )
        return room, words
    fraction, free = CPU_FRACTION if given is None else given, free_memory()
    room = int(fraction * free) // ranks
    words = (
        f"mem_fraction_static {fraction:g}{source} of the {free / GB:.1f} GB free after loading: {room / GB:.2f} "
        f"GB{among}; {(1.0 - fraction) * free / GB:.1f} GB stay for workspaces and others"
    )
    return room, words


def _place(device: torch.device) -> int:
    """A number that is the same on all ranks that share this device's memory.

    It is also the same in two containers of one machine, even if each has a memory limit of its own. Each rank then
    takes only a part of its own limit: less than it could, never more.
    """
    try:
        machine = BOOT_ID.read_text().strip()
    except OSError:
        machine = platform.node()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine += f"/{getattr(properties, 'uuid', device)}"
    return int.from_bytes(hashlib.blake2b(machine.encode(), digest_size=7).digest(), "big")
