"""A draft of several layers, one runner per layer: runner i drafts level i (MTP; upstream: SGLang #22954).

The label of a row is its position. The row of runner i at label q reads the embedding of token q + 1 and a hidden:
runner 0 reads the target's hidden at q, any other runner the hidden that runner i - 1 passed on at label q - 1. If the
format is `chained`, a runner passes on its output. Otherwise it passes on its input, so that runner i reads the
target's hidden at q - i.

In training, the row of layer i that reads token q + 1 has position q - i. Here its position is q, so that all runners
read the same token at the same label and share slots. Hence rows of runner i at labels below i are not valid, and
attention masks them. The hidden that a runner passes on is kept by slot, in a buffer beside the runner's pool. Chunked
prefill, cached prefixes, and requests that lose their slots and start over need no other state.

Legend: R requests, K topk, S depth, H draft width, T rows.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.attention.ancestor_bits import word_count
from cluster.batch import AttentionMetadata, Batch, with_prompts
from cluster.config.tree_shape import TreeShape
from cluster.kv.page_table import PageTable
from cluster.kv.pool import zeros
from cluster.models.runner import DraftRunner
from cluster.models.vocab import ShardedLogits
from cluster.sampling.sampling_inputs import PhaseSampling, SamplingInputs
from cluster.spec.extend import extend_attention, extend_input
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.levels import BY_PROBABILITY, Ancestry, GrowthSettings, gather_by_parent, grow
from cluster.spec.propose import Ranking, next_draft_input
from cluster.spec.tree import DraftTree, chain
from cluster.spec.verify import Accepted


def buffer_bytes(runners: int, hidden: int, dtype: torch.dtype) -> int:
    """Return the bytes per token of the buffers in which `runners` runners keep the hidden states that they pass on; 0
    for a single runner, which has no buffer.
    """
    return runners * hidden * dtype.itemsize if runners > 1 else 0


class MultiLayerDraft:
    """Drafts with a list of runners. At level l, runner l runs the rows of levels 1 to l, so that its own pool holds
    the KV of all these rows.

    Runners use the target's slot numbers. Each runner has its own pool, and a buffer `[slots, H]` in `_passed_hidden`,
    which holds the hidden states that it passed on to the next runner.
    """

    def __init__(
        self,
        draft_runner_list: list[DraftRunner],
        ranking: Ranking,
        table: PageTable,
        growth: GrowthSettings = BY_PROBABILITY,
    ) -> None:
        """`draft_runner_list` has one runner per level; `table` is the page table that they share."""
        self._runners, self._ranking, self._table, self._growth = draft_runner_list, ranking, table, growth
        self.chances = growth.chances
        first_runner = draft_runner_list[0]
        spec, pools = first_runner.model.spec, first_runner.pools
        self._chained = spec.chained
        shape = pools.slots, spec.hidden
        self._passed_hidden = [zeros(shape, pools.dtype, table.device) for _ in draft_runner_list]

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """Copy the passed-on hidden from slot `source[i]` to slot `destination[i]`, in the buffer of every runner."""
        for buffer in self._passed_hidden:
            buffer.index_copy_(0, destination, buffer.index_select(0, source))

    def draft(
        self, batch: Batch, draft_input: EagleDraftInput, phase_sampling: PhaseSampling, shape: TreeShape
    ) -> DraftTree:
        """Return trees `[R, N]` for the decoding requests; see `Draft.draft`."""
        if shape.num_steps == 0:
            return chain(draft_input.bonus[:, None])
        return grow(
            draft_input,
            phase_sampling,
            shape,
            self._ranking,
            _RunnerPerLevel(self, batch, draft_input, shape),
            self._growth,
        )

    def run_level(
        self, batch: Batch, level: int, tokens: Tensor, hidden: Tensor, bits: Tensor
    ) -> tuple[ShardedLogits, Tensor]:
        """Run runner `level` over the rows of all levels so far, `tokens` `[R, level K]` with `hidden`
        `[R, level K, H]`. Return the logits of the R K rows of the last level, and the hidden states that the runner
        passes on to the next runner, `[R, level K, H]`. `bits` are the ancestor masks of all rows.
        """
        (r, count), runner = tokens.shape, self._runners[level]
        k = count // level
        # The rows of level l are at position seq_len + l - 1; rows of a level are neighbours.
        depth = torch.arange(level, device=hidden.device).repeat_interleave(k)
        positions = (batch.seq_lens[:, None] + depth).reshape(-1)
        written_slots = batch.window[:, :count].reshape(-1)
        attention = AttentionMetadata(written_slots, batch.tree(bits, count), first=level)
        hidden_rows = hidden.reshape(r * count, hidden.shape[-1])
        normed, recurrent = runner.forward(tokens.reshape(-1), positions, hidden_rows, attention)
        last_level_hidden = normed.view(r, count, normed.shape[-1])[:, count - k :]
        logits = runner.logits(last_level_hidden.reshape(r * k, last_level_hidden.shape[-1]))
        return logits, (recurrent if self._chained else hidden_rows).view(hidden.shape)

    def root_hidden(self, batch: Batch, level: int) -> Tensor:
        """Return the hidden that runner `level` - 1 passed on at each request's last committed token, `[R, H]`."""
        last_slots = self._table.slots(batch.decode_rows, (batch.seq_lens - 1).clamp(min=0))
        return self._passed_hidden[level - 1].index_select(0, last_slots)

    def extend(
        self,
        batch: Batch,
        accepted: Accepted,
        target_hidden: list[Tensor],
        sampling_inputs: SamplingInputs,
        shape: TreeShape,
    ) -> EagleDraftInput:
        """Run the newly committed tokens through every runner; see `Draft.extend`."""
        # `previous_slots`: the slot of the row one label earlier, where the next runner finds its hidden.
        extend_rows = extend_input(batch, accepted, target_hidden, shape, self._runners[0].model.spec)
        attention = extend_attention(batch, shape)
        rows = with_prompts(batch.decode_rows.repeat_interleave(shape.num_steps + 1), batch.prompt.rows)
        previous_slots = self._table.slots(rows, (extend_rows.positions - 1).clamp(min=0))
        hidden = self._runners[0].fuse_aux(extend_rows.hidden)
        outputs = []
        for i, runner in enumerate(self._runners):
            outputs.append(
                runner.forward(extend_rows.token_ids, extend_rows.positions, hidden, replace(attention, first=i))
            )
            # `_passed_hidden` is written before it is read, because the row one label earlier is often part of this
            # forward. The first token of a request has no row before it, so it reads zeros.
            self._passed_hidden[i].index_copy_(0, attention.write, outputs[-1][1] if self._chained else hidden)
            hidden = (
                self._passed_hidden[i]
                .index_select(0, previous_slots)
                .masked_fill_((extend_rows.positions == 0)[:, None], 0)
            )
        # Runner 0 proposes the tokens after the bonus; the next draft phase begins with runner 1.
        normed, recurrent = outputs[0]
        extend_output = normed.index_select(0, extend_rows.select), recurrent.index_select(0, extend_rows.select)
        return next_draft_input(self._runners[0], self._ranking, sampling_inputs, accepted, extend_output)


class _RunnerPerLevel:
    """`LevelRunner` with a runner per level; each runs the rows of all levels so far."""

    def __init__(self, draft: MultiLayerDraft, batch: Batch, draft_input: EagleDraftInput, shape: TreeShape) -> None:
        self._draft, self._batch, self._ancestry = draft, batch, Ancestry(draft_input, shape)
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._bits: list[Tensor] = []
        self._passed_hidden: Tensor | None = None

    def run(self, level: int, tokens: Tensor, parent: Tensor | None) -> ShardedLogits:
        r, k = tokens.shape
        self._tokens.append(tokens)
        self._bits.append(self._ancestry.descend(level, parent))
        if parent is not None:
            self._parents.append(parent)
        # Each row's hidden comes from the row one label earlier. For all K rows of level 1, this is the row of the last
        # committed token; for a row of level j + 1, it is the row of its parent in level j.
        level_hidden = [self._draft.root_hidden(self._batch, level)[:, None].expand(r, k, -1)]
        for j, parent_index in enumerate(self._parents):
            assert self._passed_hidden is not None, "the level before has run"
            level_hidden.append(gather_by_parent(self._passed_hidden[:, j * k : (j + 1) * k], parent_index))
        # Bits of earlier levels have fewer words; pad them to the width of this level.
        width_in_words = word_count(level * k)
        bits = torch.cat([F.pad(level_bits, (0, width_in_words - level_bits.shape[2])) for level_bits in self._bits], 1)
        all_tokens, hidden = torch.cat(self._tokens, 1), torch.cat(level_hidden, 1)
        logits, self._passed_hidden = self._draft.run_level(self._batch, level, all_tokens, hidden, bits)
        return logits
