"""Extend: the inputs of the draft's forward over the tokens that were just committed.

Each decoding request has S + 1 rows, one for each place of the accepted path (not N, one for each node). The c prompt
rows follow. All rows carry the target's true hidden states; drafting used the draft's own approximations.
"""

import torch
from torch import Tensor

from cluster.arch import DraftSpec
from cluster.attention.ancestor_bits import line_bits
from cluster.batch import AttentionMetadata, Batch, with_prompts
from cluster.config.tree_shape import TreeShape
from cluster.spec.inputs import EagleDraftExtendInput
from cluster.spec.verify import Accepted


def extend_input(
    batch: Batch, accepted: Accepted, features: list[Tensor], shape: TreeShape, draft: DraftSpec
) -> EagleDraftExtendInput:
    """Return rows `[R (S + 1) + c]`: the row at position p pairs the target's hidden at p with the token at p + 1."""
    r, n, width, device = batch.decodes, shape.num_draft_tokens, shape.num_steps + 1, accepted.bonus.device
    prompt = batch.prompt
    # Rows of `features`: node j of request i is row i N + j, and prompt rows follow from row R N on.
    nodes = torch.arange(r, device=device)[:, None] * n + accepted.path
    source = with_prompts(nodes.view(-1), torch.arange(r * n, r * n + prompt.token_ids.shape[0], device=device))
    # The last row of a finished prompt is followed by the token that the target has just chosen.
    after = prompt.next_ids.index_copy(0, prompt.final_rows, accepted.bonus[r:])
    positions = batch.seq_lens[:, None] + torch.arange(width, device=device)
    # Rows beyond accept_len are computed but not used. The next proposals follow the last committed row of each
    # request: row i (S + 1) + accept_len - 1.
    last = torch.arange(r, device=device) * width + accepted.accept_len - 1
    return EagleDraftExtendInput(
        hidden=EagleDraftExtendInput.hidden_of(draft, features, source),
        token_ids=with_prompts(accepted.tokens.view(-1), after),
        positions=with_prompts(positions.view(-1), prompt.positions),
        select=with_prompts(last, prompt.final_rows + r * width),
    )


def extend_seen(batch: Batch, shape: TreeShape) -> AttentionMetadata:
    """Return the attention metadata of the rows of `extend_input`: each decoding request's S + 1 rows are a causal
    chain after its committed tokens, and prompt chunks are as in the target's forward.
    """
    width = shape.num_steps + 1
    write = with_prompts(batch.window[:, :width].reshape(-1), batch.prompt.write)
    return AttentionMetadata(write, batch.tree(line_bits(width, width, write.device), width), batch.prompt.text)
