"""The memory of one rank besides its weights: KV pools and the runners bound to them, pages and page table."""

from dataclasses import dataclass

import torch

from cluster.attention.bind import bind_attention
from cluster.attention.gather import Gather
from cluster.device.timing import Spans, timer_of
from cluster.distributed.mesh import Mesh
from cluster.engine.models import RankModels
from cluster.kv.budget import Capacity, Needs, kv_capacity, page_count
from cluster.kv.cache import KVCache
from cluster.kv.page_table import PageTable
from cluster.models.runner import DraftRunner, TargetRunner


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Runners share page and slot numbers through `cache`, and have a pool each. Sizes are one rank's."""

    capacity: Capacity
    cache: KVCache
    target_runner: TargetRunner
    draft_runner_list: list[DraftRunner]
    watch: Spans


def allocate(
    models: RankModels, mesh: Mesh, device: torch.device, context_length: int, needs: Needs | None = None
) -> RankMemory:
    """Size the pools, the same on all ranks, by the memory that is left when all models are loaded; `needs` are those
    of a device with memory of its own.

    Raises:
        ConfigError: not even a short request would fit, or a device has less memory than is set.
    """
    config, window = models.resolved.config, models.resolved.shape.window
    capacity = kv_capacity(config, mesh, device, models.token_bytes, context_length, window, needs)
    return allocate_pages(models, device, context_length, page_count(config, capacity, window), capacity)


def allocate_pages(
    models: RankModels, device: torch.device, context_length: int, pages: int, capacity: Capacity
) -> RankMemory:
    """Pools of so many pages, and the sink; `capacity` is what they were sized by."""
    resolved, watch = models.resolved, Spans(timer_of(device))
    config, window, spec = resolved.config, resolved.shape.window, resolved.draft
    longest = context_length + resolved.shape.forcing().window
    table = PageTable(config.max_running_requests, longest, config.page_size, device)
    cache = KVCache(pages, table, radix=not config.disable_radix_cache)
    slots = (pages + 1) * config.page_size
    gather = Gather(table, window)
    shared = slots, models.dtype, gather, models.kernels, models.fp8_cache
    first, *others = [bind_attention(layers, *shared) for layers in models.layers]
    boundaries = spec.aux_boundaries if spec is not None and spec.use_aux_hidden_state else ()
    drafts = [DraftRunner(model, *own, watch) for model, own in zip(models.drafts, others, strict=True)]
    return RankMemory(capacity, cache, TargetRunner(models.target, *first, boundaries, watch), drafts, watch)
