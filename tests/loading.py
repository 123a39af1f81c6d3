"""Models of tests: loaded from a folder alone; what `resolve_models` would have told is read on the way."""

from collections.abc import Mapping
from typing import Any

import torch

from cluster.arch import DraftSpec, TargetArch, read_draft, read_target
from cluster.distributed.mesh import Shard
from cluster.engine.backends import select_kernels
from cluster.models import registry
from cluster.models.checkpoint import Checkpoint
from cluster.models.context import ModelContext, Sharding
from cluster.models.draft import DraftModel
from cluster.models.exchange import NoExchange, TokenExchange
from cluster.models.target import DecoderTarget


def context(
    dtype: torch.dtype = torch.float64,
    exchange: TokenExchange | None = None,
    part: Shard | None = None,
    max_position: int = 64,
) -> ModelContext:
    """On the CPU, whole or `part` of everything."""
    whole = part or Shard()
    given, device = exchange or NoExchange(), torch.device("cpu")
    kernels = select_kernels("auto", device, dtype)
    return ModelContext(dtype, device, given, Sharding(whole, whole, whole), max_position, kernels)


def check_target(folder: str) -> TargetArch:
    arch = read_target(folder)
    registry.check_target(folder, arch)
    return arch


def load_target(folder: str, given: ModelContext) -> DecoderTarget:
    return registry.load_target(folder, read_target(folder), given)


def spec_of(
    folder: str, target: TargetArch, overrides: Mapping[str, Any] | None = None, token_map: str | None = None
) -> DraftSpec:
    return read_draft(folder, Checkpoint(folder).shapes, target, overrides, token_map)


def check_draft(folder: str, target: TargetArch) -> DraftSpec:
    spec = spec_of(folder, target)
    registry.check_draft(folder, spec)
    return spec


def load_draft(
    folder: str,
    target: DecoderTarget,
    given: ModelContext,
    overrides: Mapping[str, Any] | None = None,
    token_map: str | None = None,
) -> DraftModel:
    spec = spec_of(folder, target.arch, overrides, token_map)
    return registry.load_draft_list(folder, spec, target, given, 1)[0]
