"""Which GPUs Ray gave this process, and that it sees no others."""

import os
from collections.abc import Mapping, MutableMapping

import ray

VISIBLE = "CUDA_VISIBLE_DEVICES"


def own_gpus() -> tuple[str, ...]:
    """The ids of the GPUs that Ray reserves for this actor on its node; none where its bundle has none."""
    given: Mapping[str, list[str]] = ray.get_runtime_context().get_accelerator_ids()
    return tuple(str(gpu) for gpu in given.get("GPU", []))


def see_only(gpus: tuple[str, ...], environment: MutableMapping[str, str] = os.environ) -> None:
    """Make these GPUs all that CUDA sees, before it starts in this process; without any, leave all as it is.

    Ray does so by itself, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES keeps it from that. A rank would then
    compute on the GPU of another gang's rank on the same node.
    """
    if gpus:
        environment[VISIBLE] = ",".join(gpus)
