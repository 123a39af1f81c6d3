"""The setting `one_shot_all_reduce`: checks that it can work, and compares its kernel with the reference at start."""

from functools import partial

import torch

from cluster.config import ConfigError, EngineConfig
from cluster.distributed.mesh import Mesh
from cluster.distributed.one_shot_all_reduce import OneShot, check_against_reference


def check_one_shot_setting(config: EngineConfig, device: torch.device) -> None:
    """Raise `ConfigError` if the setting is on but cannot work (without CUDA) or would change nothing (one rank)."""
    if config.one_shot_all_reduce and device.type != "cuda":
        raise ConfigError(f"one_shot_all_reduce reads the memory of other GPUs, and device is {device.type}; unset it")
    if config.one_shot_all_reduce and config.tp_size == 1:
        raise ConfigError("one_shot_all_reduce needs several ranks, and tp_size is 1; unset it")


def enable_one_shot(config: EngineConfig, mesh: Mesh, device: torch.device) -> None:
    """If the setting is on, sum small tensors with the one-shot kernel, in both process groups of the mesh. All ranks
    must call this.

    Raises:
        ConfigError: the GPUs cannot read each other's memory, or the kernel differs from its reference implementation.
    """
    if not config.one_shot_all_reduce:
        return
    for axis in (mesh.world, mesh.attn):
        if axis.size == 1:
            continue
        try:
            one_shot = OneShot(axis.group, axis.size, device)
            ones = [1] * axis.size
            check_against_reference(one_shot, axis.rank, axis.all_reduce, partial(axis.gather, counts=ones), device)
        except RuntimeError as error:
            raise ConfigError(
                f"one_shot_all_reduce cannot be had among {axis.size} ranks: {error}; unset it"
            ) from error
        axis.one_shot = one_shot
