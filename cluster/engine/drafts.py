"""Creates the draft of an engine, and the lookup that adds tokens to its trees."""

import torch

from cluster.engine.backends import (
    add_looked_up_of,
    chances_of,
    lookup_chances_of,
    lookup_of,
    sampler_of,
    tree_backend_of,
)
from cluster.engine.memory import RankMemory
from cluster.engine.models import RankModels
from cluster.spec.draft import Draft, EagleDraft, NoDraft
from cluster.spec.levels import GrowthSettings
from cluster.spec.lookup import TreeLookup
from cluster.spec.multilayer import MultiLayerDraft
from cluster.spec.ngram import NgramDraft
from cluster.spec.propose import CoupledRanking
from cluster.spec.resting import RestingDraft
from cluster.spec.token_history import TokenHistory


def create_draft(models: RankModels, memory: RankMemory, device: torch.device) -> Draft:
    """Return the draft that uses `memory.draft_runner_list`: `EagleDraft` if one runner drafts all levels,
    `MultiLayerDraft` if each level has its own runner. With adaptive trees, an `EagleDraft` is in a `RestingDraft`
    (which need not read the tokens of steps without trees), except with FlashInfer. Without runners, return
    `NgramDraft` for n-gram speculation, otherwise `NoDraft`.
    """
    runners, resolved, kernels, table = memory.draft_runner_list, models.resolved, models.kernels, memory.cache.table
    if not runners:
        if not resolved.looks_up_tokens:
            return NoDraft()
        return NgramDraft(_create_history(models, device))
    model = runners[0].model
    # Triton's growth does not say which candidates it selects, so nothing can be learned about them.
    learns = any(shape.max_nodes for shape in resolved.tiers) and kernels.name in ("torch", "c")
    growth = GrowthSettings(tree_backend_of(kernels).create_growth, chances_of(kernels, device) if learns else None)
    ranking = CoupledRanking(model.target_ids, resolved.shape.topk, model.shard_target_ids, sampler_of(kernels))
    if len(runners) > 1:
        return MultiLayerDraft(runners, ranking, table, growth)
    draft = EagleDraft(runners[0], ranking, growth)
    # FlashInfer plans attention over all tokens that are certainly committed. A resting draft that wakes has rows at
    # earlier positions, which must not see all of these tokens.
    return RestingDraft(draft, runners[0], table) if resolved.adaptive_trees and kernels.flashinfer is None else draft


def create_lookup(models: RankModels, device: torch.device) -> TreeLookup | None:
    """Return the object that adds looked-up tokens (what followed an earlier occurrence of the end of the text) to
    drafted trees. Return None if no tree has such tokens.
    """
    count = models.resolved.lookup_tokens
    if not count:
        return None
    chances, add = lookup_chances_of(models.kernels, device), add_looked_up_of(models.kernels)
    return TreeLookup(_create_history(models, device), chances, count, add)


def _create_history(models: RankModels, device: torch.device) -> TokenHistory:
    resolved = models.resolved
    rows = resolved.settings.max_running_requests + 1  # the last row is that of idle requests (padding)
    return TokenHistory(rows, resolved.context_length, lookup_of(models.kernels), device)
