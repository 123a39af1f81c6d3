"""A draft of several layers, each a runner of its own: runner i drafts level i (MTP; upstream: SGLang #22954).

The label of a row is its position. Runner i's row at label q reads the embedding of token q + 1, and the hidden that
runner i - 1 passed on at label q - 1. If the format is `chained`, a runner passes on its output. Otherwise it passes on
its input, so that runner i reads the target's hidden at q - i.

In training, the row of layer i that reads token q + 1 has position q - i. Here its position is q, so that all runners
read the same token at the same label and share slots. Hence rows of runner i at labels below i are not valid, and
attention masks them. The hidden that a runner passes on is kept by slot, in a buffer beside the runner's pool. Chunked
prefill, cached prefixes and retraction need no other state.

Legend: R requests, K topk, S depth, H draft width, T rows.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.attention.ancestor_bits import words
from cluster.batch import AttentionMetadata, Batch, with_prompts
from cluster.config.tree_shape import TreeShape
from cluster.kv.page_table import PageTable
from cluster.kv.pool import zeros
from cluster.models.runner import DraftRunner
from cluster.models.vocab import ShardedLogits
from cluster.sampling.sampling_inputs import PhaseSampling, SamplingInputs
from cluster.spec.extend import extend_input, extend_seen
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.levels import Ancestry, after, grow
from cluster.spec.propose import Ranking, carry
from cluster.spec.tree import DraftTree, Sprout, TorchGrowth, chain
from cluster.spec.verify import Accepted


def kept_bytes(runners: int, hidden: int, dtype: torch.dtype) -> int:
    """Return the bytes per token that `runners` runners keep beside their pools; a single runner keeps nothing."""
    return runners * hidden * dtype.itemsize if runners > 1 else 0


class MultiLayerDraft:
    """Drafts with a list of runners. At level l, runner l runs the rows of levels 1 to l, so that its own pool holds
    the cells of all these rows.

    Runners use the target's slot numbers. Each runner has its own pool, and a buffer in `_gave`, `[slots, H]`, with the
    hidden that it passed on.
    """

    def __init__(
        self, draft_runner_list: list[DraftRunner], ranking: Ranking, table: PageTable, sprout: Sprout = TorchGrowth
    ) -> None:
        """`draft_runner_list` has one runner per level; `table` is the page table that they share."""
        self._runners, self._ranking, self._table, self._sprout = draft_runner_list, ranking, table, sprout
        first = draft_runner_list[0]
        spec, pool = first.model.spec, first.pool
        self._chained = spec.chained
        self._gave = [zeros((pool.slots, spec.hidden), pool.dtype, pool.kv.device) for _ in draft_runner_list]

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """Copy the hidden kept beside the pools from slot `source[i]` onto `destination[i]`."""
        for kept in self._gave:
            kept.index_copy_(0, destination, kept.index_select(0, source))

    def draft(self, batch: Batch, carried: EagleDraftInput, drawing: PhaseSampling, shape: TreeShape) -> DraftTree:
        """Return trees `[R, N]` for the decoding requests; see `Draft.draft`."""
        if shape.num_steps == 0:
            return chain(carried.bonus[:, None])
        return grow(carried, drawing, shape, self._ranking, _OneEach(self, batch, carried, shape), self._sprout)

    def run_level(
        self, batch: Batch, level: int, tokens: Tensor, source: Tensor, bits: Tensor
    ) -> tuple[ShardedLogits, Tensor]:
        """Run runner `level` over the rows of all levels so far: `tokens` `[R, level K]`, hidden `source`
        `[R, level K, H]` -> logits of the R K rows of the last level, and what the runner passes on `[R, level K, H]`.
        """
        (r, count), runner = tokens.shape, self._runners[level]
        k = count // level
        # The rows of level l are at position seq_len + l - 1; rows of a level are neighbours.
        depth = torch.arange(level, device=source.device).repeat_interleave(k)
        positions = (batch.seq_lens[:, None] + depth).reshape(-1)
        write = batch.window[:, :count].reshape(-1)
        seen = AttentionMetadata(write, batch.tree(bits, count), first=level)
        rows = source.reshape(r * count, source.shape[-1])
        normed, recurrent = runner.forward(tokens.reshape(-1), positions, rows, seen)
        last = normed.view(r, count, normed.shape[-1])[:, count - k :]
        columns = runner.logits(last.reshape(r * k, last.shape[-1]))
        return columns, (recurrent if self._chained else rows).view(source.shape)

    def given_at_root(self, batch: Batch, level: int) -> Tensor:
        """Return what runner `level` - 1 passed on at each request's last committed token, `[R, H]`."""
        last = self._table.slots(batch.decode_rows, (batch.seq_lens - 1).clamp(min=0))
        return self._gave[level - 1].index_select(0, last)

    def extend(
        self, batch: Batch, accepted: Accepted, features: list[Tensor], draw: SamplingInputs, shape: TreeShape
    ) -> EagleDraftInput:
        """Run the committed rows through every runner; see `Draft.extend`."""
        # `before`: the slot of the row one label earlier, where the next runner finds its hidden.
        given = extend_input(batch, accepted, features, shape, self._runners[0].model.spec)
        seen = extend_seen(batch, shape)
        rows = with_prompts(batch.decode_rows.repeat_interleave(shape.num_steps + 1), batch.prompt.rows)
        before = self._table.slots(rows, (given.positions - 1).clamp(min=0))
        source = self._runners[0].fuse_aux(given.hidden)
        outputs = []
        for i, runner in enumerate(self._runners):
            outputs.append(runner.forward(given.token_ids, given.positions, source, replace(seen, first=i)))
            # `_gave` is written before it is read, because the row one label earlier is often part of this forward. The
            # first token of a request has no row before it, so it reads zeros.
            self._gave[i].index_copy_(0, seen.write, outputs[-1][1] if self._chained else source)
            source = self._gave[i].index_select(0, before).masked_fill_((given.positions == 0)[:, None], 0)
        # Runner 0 proposes the tokens after the bonus; the next draft phase begins with runner 1.
        normed, recurrent = outputs[0]
        gave = normed.index_select(0, given.select), recurrent.index_select(0, given.select)
        return carry(self._runners[0], self._ranking, draw, accepted, gave)


class _OneEach:
    """`Levels` with a runner per level; each runs the rows of all levels so far."""

    def __init__(self, draft: MultiLayerDraft, batch: Batch, carried: EagleDraftInput, shape: TreeShape) -> None:
        self._draft, self._batch, self._ancestry = draft, batch, Ancestry(carried, shape)
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._bits: list[Tensor] = []
        self._gave: Tensor | None = None

    def run(self, level: int, tokens: Tensor, parent: Tensor | None) -> ShardedLogits:
        r, k = tokens.shape
        self._tokens.append(tokens)
        self._bits.append(self._ancestry.descend(level, parent))
        if parent is not None:
            self._parents.append(parent)
        # Each row's hidden comes from one label earlier: for all K rows of level 1, from the last committed token; for
        # a row of level j + 1, from its parent's row in level j.
        sources = [self._draft.given_at_root(self._batch, level)[:, None].expand(r, k, -1)]
        for j, above in enumerate(self._parents):
            assert self._gave is not None, "the level before gave something"
            sources.append(after(self._gave[:, j * k : (j + 1) * k], above))
        # Bits of earlier levels have fewer words; pad them to the width of this level.
        wide = words(level * k)
        bits = torch.cat([F.pad(each, (0, wide - each.shape[2])) for each in self._bits], 1)
        rows, source = torch.cat(self._tokens, 1), torch.cat(sources, 1)
        columns, self._gave = self._draft.run_level(self._batch, level, rows, source, bits)
        return columns
