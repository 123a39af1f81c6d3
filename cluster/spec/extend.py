"""Extend: the inputs of the draft's forward over the tokens that were just committed.

Each decoding request has S + 1 rows, one for each place of the accepted path (not N, one for each node). The c prompt
rows follow. The draft reads the target's true hidden states in all rows; while it drafted, it read its own
approximations of them.
"""

import torch
from torch import Tensor

from cluster.arch import DraftSpec
from cluster.attention.ancestor_bits import chain_bits
from cluster.batch import AttentionMetadata, Batch, with_prompts
from cluster.config.tree_shape import TreeShape
from cluster.spec.inputs import EagleDraftExtendInput
from cluster.spec.verify import Accepted


def extend_input(
    batch: Batch, accepted: Accepted, target_hidden: list[Tensor], shape: TreeShape, draft: DraftSpec
) -> EagleDraftExtendInput:
    """Return rows `[R (S + 1) + c]`: the row at position p pairs the target's hidden at p with the token at p + 1."""
    r, path_length, device = batch.decodes, shape.num_steps + 1, accepted.bonus.device
    tree_rows = r * shape.num_draft_tokens
    prompt = batch.prompt
    # Rows of `target_hidden`: first the R N rows of the trees, then those of prompts.
    source_rows = with_prompts(
        accepted.rows_of_path(shape.num_draft_tokens).view(-1),
        torch.arange(tree_rows, tree_rows + prompt.token_ids.shape[0], device=device),
    )
    positions = batch.seq_lens[:, None] + torch.arange(path_length, device=device)
    # Rows beyond accept_len are computed but not used. The next proposals follow the last committed row of each
    # request: row i (S + 1) + accept_len - 1.
    last_committed_rows = torch.arange(r, device=device) * path_length + accepted.accept_len - 1
    return EagleDraftExtendInput(
        hidden=EagleDraftExtendInput.hidden_of(draft, target_hidden, source_rows),
        token_ids=with_prompts(accepted.tokens.view(-1), prompt_token_ids(batch, accepted)),
        positions=with_prompts(positions.view(-1), prompt.positions),
        select=with_prompts(last_committed_rows, prompt.final_rows + r * path_length),
    )


def prompt_token_ids(batch: Batch, accepted: Accepted) -> Tensor:
    """Return the token after each prompt row, `[c]`. The last row of a finished prompt is followed by the token that
    the target has just chosen.
    """
    return batch.prompt.next_ids.index_copy(0, batch.prompt.final_rows, accepted.bonus[batch.decodes :])


def extend_attention(batch: Batch, shape: TreeShape) -> AttentionMetadata:
    """Return the attention metadata of the rows of `extend_input`: each decoding request's S + 1 rows are a causal
    chain after its committed tokens, and prompt chunks are as in the target's forward.
    """
    path_length = shape.num_steps + 1
    written_slots = with_prompts(batch.window[:, :path_length].reshape(-1), batch.prompt.write)
    return AttentionMetadata(
        written_slots,
        batch.tree(chain_bits(path_length, path_length, written_slots.device), path_length),
        batch.prompt.text,
    )
