"""Loads and checks models for tests from a folder only. `read_target` and `read_draft` replace `resolve_models`."""

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
    shard: Shard | None = None,
    max_position: int = 64,
) -> ModelContext:
    """Return a context that loads a model on the CPU: all of it, or only one shard of every sharded tensor."""
    used_shard = shard or Shard()
    used_exchange, device = exchange or NoExchange(), torch.device("cpu")
    kernels = select_kernels("auto", device, dtype)
    return ModelContext(
        dtype, device, used_exchange, Sharding(used_shard, used_shard, used_shard), max_position, kernels
    )


def check_target(folder: str) -> TargetArch:
    arch = read_target(folder)
    registry.check_target(folder, arch)
    return arch


def load_target(folder: str, model_context: ModelContext) -> DecoderTarget:
    return registry.load_target(folder, read_target(folder), model_context)


def read_draft_spec(
    folder: str, target: TargetArch, overrides: Mapping[str, Any] | None = None, token_map: str | None = None
) -> DraftSpec:
    return read_draft(folder, Checkpoint(folder).shapes, target, overrides, token_map)


def check_draft(folder: str, target: TargetArch) -> DraftSpec:
    spec = read_draft_spec(folder, target)
    registry.check_draft(folder, spec)
    return spec


def load_draft(
    folder: str,
    target: DecoderTarget,
    model_context: ModelContext,
    overrides: Mapping[str, Any] | None = None,
    token_map: str | None = None,
) -> DraftModel:
    spec = read_draft_spec(folder, target.arch, overrides, token_map)
    return registry.load_draft_list(folder, spec, target, model_context, 1)[0]
