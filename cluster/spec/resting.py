"""A draft that rests: while steps draft nothing, it does not read the tokens that the target commits.

To read the tokens, the draft would need a forward in every step. So a resting draft only keeps what it would read: for
the last `MISSED_TOKENS` tokens of each request, the target's hidden states and the next tokens. Before steps draft
again, the draft wakes: in one step it reads these rows for all requests at once (`ExtendMode.MISSED`). The next step
drafts. Tokens further back stay unread, and their KV in the draft's cache is zeros, so the draft guesses a little
worse. The tokens that come out never depend on the draft (law 1 in docs/architecture.md).

Legend: R decoding requests, c prompt rows, M `MISSED_TOKENS`, A the width of the hidden states that the draft takes.
"""

import torch
from torch import Tensor

from cluster.attention.ancestor_bits import chain_bits
from cluster.batch import AttentionMetadata, Batch, ExtendMode, TreeRows, with_prompts
from cluster.config.speculation import MISSED_TOKENS
from cluster.config.tree_shape import TreeShape
from cluster.kv.page_table import PageTable
from cluster.models.runner import DraftRunner
from cluster.sampling.sampling_inputs import PhaseSampling, SamplingInputs
from cluster.spec.draft import EagleDraft
from cluster.spec.extend import prompt_token_ids
from cluster.spec.inputs import EagleDraftExtendInput, EagleDraftInput
from cluster.spec.tree import DraftTree
from cluster.spec.verify import Accepted


class RestingDraft:
    """Wraps an `EagleDraft` that may rest in steps without trees. A draft that rests does not read the tokens of
    decoding requests. It keeps the target's hidden states, and reads the tokens when it wakes. `Batch.extend_mode`
    says whether the draft rests in a step.
    """

    def __init__(self, draft: EagleDraft, runner: DraftRunner, table: PageTable) -> None:
        """`runner` is that of `draft`; `table` is the page table of the requests."""
        self._draft, self._runner, self._table, self.chances = draft, runner, table, draft.chances
        spec, device, rows = runner.model.spec, table.lens.device, table.lens.shape[0]
        width, dtype = EagleDraftExtendInput.hidden_size_for(spec), EagleDraftExtendInput.dtype_for(runner.pools.dtype)
        # Each table row has M places in `_hidden` and `_next_ids`. What belongs to position p is in place p % M.
        # `_counts` `[rows]` is how many tokens of each request the draft has missed.
        self._hidden = torch.zeros(rows * MISSED_TOKENS, width, dtype=dtype, device=device)
        self._next_ids = torch.zeros(rows * MISSED_TOKENS, dtype=torch.int64, device=device)
        self._counts = torch.zeros(rows, dtype=torch.int64, device=device)
        self._no_cells = [pool.kv.new_zeros(rows, *pool.kv.shape[2:]) for pool in runner.pools.all]

    def draft(
        self, batch: Batch, draft_input: EagleDraftInput, phase_sampling: PhaseSampling, shape: TreeShape
    ) -> DraftTree:
        """Return trees `[R, N]` for the decoding requests; see `Draft.draft`."""
        return self._draft.draft(batch, draft_input, phase_sampling, shape)

    def extend(
        self,
        batch: Batch,
        accepted: Accepted,
        target_hidden: list[Tensor],
        sampling_inputs: SamplingInputs,
        shape: TreeShape,
    ) -> EagleDraftInput:
        """Run the newly committed tokens through the draft; if it wakes, missed tokens, too. See `Draft.extend`."""
        if batch.prompt.final_rows.shape[0]:  # a finished prompt was read whole; its count may be an earlier request's
            self._counts.index_fill_(0, batch.rows[batch.decodes :], 0)
        if batch.extend_mode is not ExtendMode.MISSED:
            return self._draft.extend(batch, accepted, target_hidden, sampling_inputs, shape)
        self._keep(batch, accepted, target_hidden)
        rows, attention = self._missed_rows(batch, accepted, target_hidden)
        self._counts.index_fill_(0, batch.decode_rows, 0)
        return self._draft.read(rows, attention, sampling_inputs, accepted)

    def rest(self, batch: Batch, accepted: Accepted, target_hidden: list[Tensor]) -> None:
        """Keep the target's hidden states that the draft does not read in this step, which has no trees. Fill the
        draft's KV of the new tokens with zeros, because these slots may still hold values of an earlier request.
        """
        self._keep(batch, accepted, target_hidden)
        slots = batch.window[:, 0].contiguous()
        for pool, no_cells in zip(self._runner.pools.all, self._no_cells, strict=True):
            own_slots = pool.own_slots(slots)
            for layer in pool.kv:
                layer.index_copy_(0, own_slots, no_cells[: batch.decodes])

    def _keep(self, batch: Batch, accepted: Accepted, target_hidden: list[Tensor]) -> None:
        """Keep the hidden state at each request's last position, and the token after it."""
        r, spec = batch.decodes, self._runner.model.spec
        places = batch.decode_rows * MISSED_TOKENS + batch.seq_lens.remainder(MISSED_TOKENS)
        own_rows = torch.arange(r, device=places.device)  # without trees each request has one row in the target
        self._hidden.index_copy_(0, places, EagleDraftExtendInput.hidden_of(spec, target_hidden, own_rows))
        self._next_ids.index_copy_(0, places, accepted.tokens[:, 0])
        counts = self._counts.index_select(0, batch.decode_rows) + 1
        self._counts.index_copy_(0, batch.decode_rows, counts)  # idle requests share a row, whose count does not matter

    def _missed_rows(
        self, batch: Batch, accepted: Accepted, target_hidden: list[Tensor]
    ) -> tuple[EagleDraftExtendInput, AttentionMetadata]:
        """Return the rows `[R M + c]` that the draft reads when it wakes: the last M positions of each request, and all
        prompt rows. Rows at positions that the draft has read before, or that do not exist yet in a short request,
        write their KV to slot 0, which nobody reads.
        """
        r, prompt, last, spec = batch.decodes, batch.prompt, batch.seq_lens, self._runner.model.spec
        first = (last - (MISSED_TOKENS - 1)).clamp_(min=0)
        positions = first[:, None] + torch.arange(MISSED_TOKENS, device=last.device)
        first_missed = last + 1 - self._counts.index_select(0, batch.decode_rows)
        exists, slots = positions <= last[:, None], self._table.slots(batch.decode_rows[:, None], positions)
        # Attention reads the KV of all M positions. Positions that do not exist yet may hold anything: fill with zeros.
        for pool in self._runner.pools.all:
            pool.kv.index_fill_(1, pool.own_slots(torch.where(exists, 0, slots).view(-1)), 0)
        written_slots = torch.where(exists & (positions >= first_missed[:, None]), slots, 0)
        positions = positions.minimum(last[:, None])
        places = (batch.decode_rows[:, None] * MISSED_TOKENS + positions.remainder(MISSED_TOKENS)).view(-1)
        prompt_rows = torch.arange(r, r + prompt.token_ids.shape[0], device=last.device)
        prompt_hidden = EagleDraftExtendInput.hidden_of(spec, target_hidden, prompt_rows)
        last_rows = torch.arange(r, device=last.device) * MISSED_TOKENS + (last - first)
        rows = EagleDraftExtendInput(
            hidden=with_prompts(self._hidden.index_select(0, places), prompt_hidden),
            token_ids=with_prompts(self._next_ids.index_select(0, places), prompt_token_ids(batch, accepted)),
            positions=with_prompts(positions.view(-1), prompt.positions),
            select=with_prompts(last_rows, prompt.final_rows + r * MISSED_TOKENS),
        )
        bits = chain_bits(MISSED_TOKENS, MISSED_TOKENS, last.device)
        tree = TreeRows(batch.decode_rows, first, bits, MISSED_TOKENS)
        return rows, AttentionMetadata(with_prompts(written_slots.view(-1), prompt.write), tree, prompt.text)
