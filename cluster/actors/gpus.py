"""The GPUs that Ray reserved for this process, and a way to hide all other GPUs from it."""

import os
from collections.abc import Mapping, MutableMapping

import ray

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def reserved_gpus() -> tuple[str, ...]:
    """Return the ids of the GPUs that Ray reserves for this actor on its node; empty if its bundle has none."""
    accelerator_ids: Mapping[str, list[str]] = ray.get_runtime_context().get_accelerator_ids()
    return tuple(str(gpu) for gpu in accelerator_ids.get("GPU", []))


def hide_other_gpus(gpus: tuple[str, ...], environment: MutableMapping[str, str] = os.environ) -> None:
    """Hide all GPUs but `gpus` from CUDA; if `gpus` is empty, change nothing. Call this before CUDA starts.

    Ray hides other GPUs itself unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set. With that variable, and
    without this call, a rank would compute on the GPU of another gang's rank on the same node.
    """
    if gpus:
        environment[VISIBLE_DEVICES] = ",".join(gpus)
