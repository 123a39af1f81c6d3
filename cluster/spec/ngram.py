"""N-gram speculation (`speculative_algorithm: NGRAM`): chains of tokens that followed the same tokens earlier in the
request. It needs no draft model. vLLM and SGLang call it n-gram, Transformers prompt lookup decoding.
"""

import torch
from torch import Tensor

from cluster.batch import Batch
from cluster.config.tree_shape import TreeShape
from cluster.sampling.sampling_inputs import PhaseSampling
from cluster.spec.draft import NoDraft
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.token_history import TokenHistory
from cluster.spec.tree import DraftTree, chain, chain_scores


class NgramDraft(NoDraft):
    """Drafts by searching for the last tokens in `history`. The step appends to `history` what it commits."""

    def __init__(self, history: TokenHistory) -> None:
        self.history = history

    def draft(
        self, batch: Batch, draft_input: EagleDraftInput, phase_sampling: PhaseSampling, shape: TreeShape
    ) -> DraftTree:
        """Return chains `[R, S + 1]`: the bonus, and the tokens that followed the same text earlier in the request."""
        bonus = draft_input.bonus[:, None]
        if shape.num_steps == 0:
            return chain(bonus)
        found = self.history.continuations(batch.decode_rows, batch.seq_lens, shape.num_steps)
        scores = chain_scores(log_chances(found.matched, shape.num_steps)) if shape.max_nodes else None
        return chain(torch.cat([bonus, found.tokens], 1), scores)


def log_chances(matched: Tensor, count: int) -> Tensor:
    """Return the logarithm of the chance of each of `count` looked-up tokens, if the token before it is right,
    `[R, count]`. `matched` `[R]` are the lengths of the matches, 0 without a match.

    After a match of m tokens the chance is taken to be m / (m + 1). That is the rule of succession for m - 1 successes
    in m - 1 trials: each token of the match, but the first, was predicted rightly. Only the order of the chances
    matters, because they decide which requests' nodes are verified.
    """
    chances = matched / (matched + 1.0)
    return chances.clamp(min=1e-6).log()[:, None].expand(-1, count)
