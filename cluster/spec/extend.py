"""Extend: committed rows, S + 1 per request (not N), then the prompt rows, with the target's true hidden states."""

from dataclasses import replace

import torch
from torch import Tensor

from cluster.attention.plan import causal_bias, window_group
from cluster.batch import AttentionPlan, Batch, Group
from cluster.config import TreeShape
from cluster.spec.inputs import EagleDraftExtendInput
from cluster.spec.verify import Accepted


def shifted(groups: tuple[Group, ...], by: int) -> tuple[Group, ...]:
    """The same groups, `by` rows further down the batch."""

    def moved(rows: slice | Tensor) -> slice | Tensor:
        return slice(rows.start + by, rows.stop + by) if isinstance(rows, slice) else rows + by

    return tuple(replace(group, rows=moved(group.rows)) for group in groups)


def extend_input(batch: Batch, accepted: Accepted, features: list[Tensor], shape: TreeShape) -> EagleDraftExtendInput:
    """Rows `[R * (S + 1) + c]`: the row at position p pairs the target's hidden at p with the token at p + 1."""
    r, n, width, device = batch.decodes, shape.num_draft_tokens, shape.num_steps + 1, accepted.bonus.device
    prompt = batch.prompt
    nodes = torch.arange(r, device=device)[:, None] * n + accepted.path
    source = torch.cat([nodes.view(-1), torch.arange(r * n, r * n + prompt.token_ids.shape[0], device=device)])
    hidden = torch.cat([feature.index_select(0, source) for feature in features], -1)
    after = prompt.next_ids.index_copy(0, prompt.final_rows, accepted.bonus[r:])
    positions = batch.seq_lens[:, None] + torch.arange(width, device=device)
    last = torch.arange(r, device=device) * width + accepted.accept_len - 1
    return EagleDraftExtendInput(
        hidden=hidden,
        token_ids=torch.cat([accepted.tokens.view(-1), after]),
        positions=torch.cat([positions.view(-1), prompt.positions]),
        select=torch.cat([last, prompt.final_rows + r * width]),
    )


def extend_plan(batch: Batch, shape: TreeShape, dtype: torch.dtype) -> AttentionPlan:
    """Causal rows after each request's committed tokens, then the prompt chunks as the target saw them."""
    rows, width = batch.decodes * (shape.num_steps + 1), shape.num_steps + 1
    write = torch.cat([batch.reach.window[:, :width].reshape(-1), batch.prompt.write])
    own = window_group(batch.reach, causal_bias(width, dtype, write.device), slice(0, rows))
    return AttentionPlan.of(write, own, *shifted(batch.prompt.groups, rows))
