"""N-gram speculation (`speculative_algorithm: NGRAM`): chains of tokens that followed the same tokens earlier in the
request. It needs no draft model. vLLM and SGLang call it n-gram, Transformers prompt lookup decoding.
"""

import torch
from torch import Tensor

from cluster.batch import Batch
from cluster.config.tree_shape import TreeShape
from cluster.sampling.sampling_inputs import PhaseSampling, SamplingInputs
from cluster.spec.draft import NoDraft
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.token_history import TokenHistory
from cluster.spec.tree import DraftTree, chain
from cluster.spec.verify import Accepted


class NgramDraft(NoDraft):
    """Drafts by looking up the tokens of `history`, to which it appends what each step commits."""

    def __init__(self, history: TokenHistory) -> None:
        self.history = history

    def draft(
        self, batch: Batch, draft_input: EagleDraftInput, phase_sampling: PhaseSampling, shape: TreeShape
    ) -> DraftTree:
        """Return chains `[R, S + 1]` of the bonus and what followed it earlier."""
        bonus = draft_input.bonus[:, None]
        if shape.num_steps == 0:
            return chain(bonus)
        tokens = self.history.continuations(batch.decode_rows, batch.seq_lens, shape.num_steps)
        return chain(torch.cat([bonus, tokens], 1))

    def extend(
        self,
        batch: Batch,
        accepted: Accepted,
        target_hidden: list[Tensor],
        sampling_inputs: SamplingInputs,
        shape: TreeShape,
    ) -> EagleDraftInput:
        """Append the committed tokens; carry the bonus only."""
        # The accepted tokens follow the old bonus, at position seq_len; the last of them is the new bonus.
        r = batch.decodes
        self.history.append(batch.decode_rows, batch.seq_lens + 1, accepted.tokens, accepted.accept_len)
        if batch.prompt.final_rows.shape[0]:
            first_tokens = accepted.bonus[r:, None]
            lens = torch.ones_like(batch.prompt.final_lens)
            self.history.append(batch.rows[r:], batch.prompt.final_lens, first_tokens, lens)
        return super().extend(batch, accepted, target_hidden, sampling_inputs, shape)
