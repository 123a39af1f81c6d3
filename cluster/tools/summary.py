"""A target's properties and memory, from its config and the headers of its files. Does not import torch."""

import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

from cluster.arch.dtypes import COMPUTE_DTYPE_BYTES, UNQUANTISED_DTYPES, cache_dtype, compute_dtype
from cluster.arch.read import read_target
from cluster.arch.safetensors.stored import stored_tensors
from cluster.arch.safetensors.tensors import ATTENTION_SCALES, check_tensors, target_tensors
from cluster.arch.target import TargetArch
from cluster.config import ConfigError
from cluster.tools.kv_memory import kv_memory

ASSUMED_DEVICE = "cuda"  # the device of a report if none is named; only torch could tell whether there is a GPU


@dataclass(slots=True)
class Report:
    """A report on a target and its draft. They can be served if `problems` is empty. If the report is for a GPU because
    no device was named, and this machine has no GPU, `here` has the memory on this machine, and the quantised weights
    and the problems where they are different on this machine. Otherwise it is None.
    """

    target: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    features: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    here: dict[str, Any] | None = None


def describe_target(folder: str, arch: TargetArch) -> dict[str, Any]:
    """Return a target's sizes, dtype and files, as JSON-ready values."""
    tensors = stored_tensors(folder)
    return {
        "folder": folder,
        "family": arch.family,
        "layers": arch.num_layers,
        "hidden": arch.hidden,
        "vocab_size": arch.vocab_size,
        "context_length": arch.max_position,
        "stored_dtype": arch.dtype,
        "parameters": sum(prod(shape) for _, shape in target_tensors(arch)),
        "stored_bytes": sum(stored.stop - stored.start for _, _, stored in tensors.values()),
        "files": len({path for path, _, _ in tensors.values()}),
    }


def features_of(arch: TargetArch) -> dict[str, Any]:
    """Return the features of a target (attention, experts, windows, tied embeddings), as JSON-ready values."""
    return {
        "speculation": None,
        "attention": "latent" if arch.layer.latent else "grouped",
        "experts": any(layer.moe for layer in arch.layers),
        "windows": sorted({layer.sliding_window for layer in arch.layers if layer.sliding_window}),
        "tied": arch.tied,
    }


def summary(folder: str, dtype: str = "auto", device: str = ASSUMED_DEVICE, cache: str = "auto") -> Report | None:
    """Return the report on a target served by one rank. `cache` is the setting `kv_cache_dtype`. Return None if the
    target has problems, quantised weights or attention scales: a report on these needs the loading code
    (`tensor_report`).
    """
    try:
        arch = read_target(folder)
        check_tensors(folder, arch)
        tensors = stored_tensors(folder)
    except ConfigError:
        return None
    if any(
        stored.dtype not in UNQUANTISED_DTYPES or re.search(ATTENTION_SCALES, name)
        for name, (_, _, stored) in tensors.items()
    ):
        return None
    compute_dtype_name = compute_dtype(arch, dtype, device)
    kv_dtype = cache_dtype(cache, compute_dtype_name)
    target = describe_target(folder, arch)
    memory = {
        "tp": 1,
        "dp": 1,
        "ep": 1,
        "dtype": compute_dtype_name,
        "kv_cache_dtype": kv_dtype,
        "device": device,
        "target_bytes_per_rank": target["parameters"] * COMPUTE_DTYPE_BYTES[compute_dtype_name],
        "draft_bytes_per_rank": 0,
        **kv_memory([arch.layers], kv_dtype, arch.max_position, device),
    }
    return Report(target, None, memory, features_of(arch))
