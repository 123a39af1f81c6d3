"""Allocates the KV memory of one rank: pages, page table, and KV pools with the runners that use them."""

from dataclasses import dataclass

import torch

from cluster.attention.gather import Gather
from cluster.device.timing import Spans, timer_of
from cluster.distributed.mesh import Mesh
from cluster.engine.backends import PoolKind, bind_layers, bind_to_target
from cluster.engine.models import RankModels
from cluster.kv.budget import Capacity, MemoryBreakdown, kv_capacity, page_count
from cluster.kv.cache import KVCache
from cluster.kv.page_table import PageTable, WindowTable
from cluster.kv.window_map import WindowMap
from cluster.kv.window_pages import WindowPages
from cluster.models.runner import DraftRunner, TargetRunner


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Pools and tables of one rank. All model runners use the page and slot numbers of `cache`; each runner has its own
    pool. `forward_spans` collects the time spans of the models' forwards.
    """

    capacity: Capacity
    cache: KVCache
    target_runner: TargetRunner
    draft_runner_list: list[DraftRunner]
    forward_spans: Spans


def allocate(
    models: RankModels, mesh: Mesh, device: torch.device, breakdown: MemoryBreakdown | None = None
) -> RankMemory:
    """Allocate the pools in the memory that the loaded models leave. The pools have the same size on all ranks.
    `breakdown` says how the memory of a device is divided, as measured; it is None on a CPU.

    Raises:
        ConfigError: not even a short request would fit, or the device has less memory than the settings ask for.
    """
    capacity = kv_capacity(models.resolved, mesh, models.pool_sizes, breakdown)
    return allocate_pages(models, device, page_count(models.resolved, capacity), capacity)


def allocate_pages(models: RankModels, device: torch.device, pages: int, capacity: Capacity) -> RankMemory:
    """Allocate pools of `pages` pages and the sink page (page 0, to which padding rows write). The pages of window
    pools are as many as `models.window_needs` says. `capacity` says what determined the size of the pools.
    """
    resolved, forward_spans, needs = models.resolved, Spans(timer_of(device)), models.window_needs
    config, spec, size = resolved.settings, resolved.draft, resolved.settings.page_size
    max_request_tokens = resolved.context_length + resolved.forced_shape.window
    window_map = None if needs is None else WindowMap(pages, size, device)
    table = PageTable(config.max_running_requests, max_request_tokens, size, device, window_map)
    window = None
    kinds = [PoolKind((pages + 1) * size, Gather(table, resolved.shape.window), table)]
    if needs is not None and window_map is not None:
        window = WindowPages(needs, needs.pages(pages, size), window_map)
        gather = Gather(WindowTable(table, window_map), resolved.shape.window)
        kinds.append(PoolKind((window.total + 1) * size, gather, table, window_map))
    cache = KVCache(pages, table, not config.disable_radix_cache, window)
    dtypes = models.dtype, resolved.fp8_cache
    target_layers, *draft_layers = models.layers
    is_windowed = models.is_windowed(target_layers)
    target_attention = bind_layers(target_layers, kinds, is_windowed, models.kernels, dtypes)
    if spec is not None and not spec.keeps_kv:
        draft_attentions = [
            bind_to_target(layers, target_layers, target_attention[0], kinds, is_windowed, models.kernels)
            for layers in draft_layers
        ]
    else:
        draft_attentions = [
            bind_layers(layers, kinds, models.is_windowed(layers), models.kernels, dtypes) for layers in draft_layers
        ]
    boundaries = spec.aux_boundaries if spec is not None and spec.use_aux_hidden_state else ()
    drafts = [
        DraftRunner(model, *attention, forward_spans)
        for model, attention in zip(models.drafts, draft_attentions, strict=True)
    ]
    return RankMemory(
        capacity,
        cache,
        TargetRunner(models.target, *target_attention, forward_spans, boundaries),
        drafts,
        forward_spans,
    )
