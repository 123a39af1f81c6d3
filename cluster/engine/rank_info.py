"""The resolved settings of a rank, with all that was chosen automatically."""

import torch

from cluster.distributed.mesh import Mesh
from cluster.engine.memory import RankMemory
from cluster.engine.models import RankModels
from cluster.observability.step_times import StepTimes
from cluster.status import CaptureInfo, RankInfo


def rank_info(
    models: RankModels, memory: RankMemory, mesh: Mesh, pace: StepTimes | None, captured: CaptureInfo | None
) -> RankInfo:
    """Return what `/server_info` tells about the rank with these `models` and this `memory`."""
    resolved = models.resolved
    config, shape, pages = resolved.settings, resolved.shape.drafted_shape, memory.cache.total_pages
    tokens, sizes = pages * config.page_size, models.pool_sizes
    return RankInfo(
        config=config,
        rank=mesh.rank,
        dp_rank=mesh.dp_rank,
        dtype=resolved.dtype,
        device=str(models.target_context.device),
        context_length=resolved.context_length,
        vocab_size=resolved.target.vocab_size,
        eos_token_ids=tuple(resolved.target.eos_token_ids),
        attention_backend=models.kernels.name,
        kernels=models.kernels.description,
        attention=models.attention,
        quantised=models.quantised,
        experts=models.experts,
        steps_ahead=resolved.steps_ahead,
        captured=captured,
        num_threads=torch.get_num_threads(),
        speculative_mode="adaptive" if resolved.adaptive_trees else "fixed",
        speculative_num_steps=shape.num_steps,
        speculative_eagle_topk=shape.topk,
        speculative_num_draft_tokens=shape.num_draft_tokens,
        speculative_lookup_tokens=resolved.lookup_tokens,
        speculative_batch_tiers=dict(config.speculative_batch_tiers),
        draft=None if resolved.draft is None else resolved.draft.info(),
        page_size=config.page_size,
        kv_pages=pages,
        kv_tokens=tokens,
        kv_cache_dtype=resolved.kv_cache_dtype,
        kv_bytes_per_token=sizes.token_bytes,
        kv_window_bytes_per_token=sizes.window_token_bytes,
        kv_window_tokens=sizes.window_tokens(tokens),
        kv_window_request_tokens=0 if sizes.window is None else sizes.window.request_pages * config.page_size,
        kv_gb=round(sizes.bytes_of(tokens) / 1e9, 3),
        kv_sized_by=memory.capacity.sized_by,
        max_request_tokens=min(resolved.context_length, tokens - resolved.forced_shape.window),
        step_costs=None if pace is None else pace.costs(),
    )
