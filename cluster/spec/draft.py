"""Draft: S - 1 forwards of R K rows grow a tree from the proposals that the last extend left.

To attention, the K rows of a level are K rows of *one* request: the request's prefix is read once, and a mask lets
every row see only its own ancestors in the window. A draft row at position p reads the token at p + 1 (the EAGLE
shift). So the rows of level l, whose tokens are at seq_len + l, are at position seq_len + l - 1.

Legend: R requests, K topk, S depth, N tree nodes, H draft width, Vd draft vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor

from cluster.attention.ancestor_bits import line_bits
from cluster.batch import AttentionMetadata, Batch
from cluster.config.tree_shape import TreeShape
from cluster.models.runner import DraftRunner
from cluster.models.vocab import ShardedLogits
from cluster.sampling.noise import at_least_float32
from cluster.sampling.sampling_inputs import PhaseSampling, SamplingInputs
from cluster.spec.extend import extend_input, extend_seen
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.levels import Ancestry, after, grow
from cluster.spec.propose import Ranking, carry
from cluster.spec.tree import DraftTree, Sprout, TorchGrowth, chain
from cluster.spec.verify import Accepted


class Draft(Protocol):
    """The draft phase and the extend phase of a step."""

    def draft(self, batch: Batch, carried: EagleDraftInput, drawing: PhaseSampling, shape: TreeShape) -> DraftTree:
        """Return trees of `shape` for the R decoding requests; the root (the bonus) is at position seq_len."""
        ...

    def extend(
        self, batch: Batch, accepted: Accepted, features: list[Tensor], draw: SamplingInputs, shape: TreeShape
    ) -> EagleDraftInput:
        """Run the committed rows through the draft; return what the B requests carry to the next step.

        `features` are the target's hidden states `[T, Ht]` of all T rows. `draw` are the sampling inputs of the token
        after each request's bonus.
        """
        ...


class NoDraft:
    """Plain decoding: a tree of one node, and nothing to extend."""

    def draft(self, batch: Batch, carried: EagleDraftInput, drawing: PhaseSampling, shape: TreeShape) -> DraftTree:
        """Return trees that are only their root."""
        return chain(carried.bonus[:, None])

    def extend(
        self, batch: Batch, accepted: Accepted, features: list[Tensor], draw: SamplingInputs, shape: TreeShape
    ) -> EagleDraftInput:
        """Carry the bonus only; the other fields are empty or zero."""
        bonus = accepted.bonus
        nothing = bonus.new_zeros(bonus.shape[0], 1)
        empty = features[0].new_zeros(bonus.shape[0], 0)
        return EagleDraftInput(nothing.to(at_least_float32(empty.dtype)), nothing, empty, bonus)


class EagleDraft:
    """A draft of one runner (EAGLE-1 to 3, one MTP layer), run S - 1 times to draft and once to extend.

    The plan of a step chooses S and N. K is fixed, because an `EagleDraftInput` holds K proposals. The runner has its
    own KV pool, but uses the same slot numbers as the target.
    """

    def __init__(self, runner: DraftRunner, ranking: Ranking, sprout: Sprout = TorchGrowth) -> None:
        self._runner, self._ranking, self._sprout = runner, ranking, sprout

    def draft(self, batch: Batch, carried: EagleDraftInput, drawing: PhaseSampling, shape: TreeShape) -> DraftTree:
        """Return trees `[R, N]` for the decoding requests; see `Draft.draft`."""
        if shape.num_steps == 0:
            return chain(carried.bonus[:, None])
        if shape.topk == 1:
            return self._chain(batch, carried, drawing, shape)
        levels = _Again(self._runner, batch, carried, shape)
        return grow(carried, drawing, shape, self._ranking, levels, self._sprout)

    def _chain(self, batch: Batch, carried: EagleDraftInput, drawing: PhaseSampling, shape: TreeShape) -> DraftTree:
        """Return the trees of topk 1: every level has one row, which sees all rows before it. `grow` would return the
        same more slowly, because it ranks candidates across levels.
        """
        tokens, hidden = carried.topk_index, carried.hidden[:, None]
        path = [carried.bonus[:, None], tokens]
        for level in range(1, shape.num_steps):
            bits = line_bits(1, level, tokens.device)
            columns, hidden = run_level(self._runner, batch, level, tokens, hidden, bits)
            # Penalties and grammars need the drafted tokens of the path, without the bonus.
            so_far = None if drawing.adjust is None else torch.cat(path[1:], 1)[:, None]
            _, proposed = self._ranking.propose(columns, drawing.at(level, 1, so_far))
            # `[R, 1, 1]` -> `[R, 1]`: the one proposal is the next level's row.
            tokens = proposed[:, 0]
            path.append(tokens)
        return chain(torch.cat(path, 1))

    def extend(
        self, batch: Batch, accepted: Accepted, features: list[Tensor], draw: SamplingInputs, shape: TreeShape
    ) -> EagleDraftInput:
        """Run the committed rows through the draft; see `Draft.extend`."""
        # Here `fuse_aux` maps the target's hidden `[T, A]` to the draft's `[T, H]`. In the draft phase, the draft reads
        # its own recurrent hidden instead.
        given = extend_input(batch, accepted, features, shape, self._runner.model.spec)
        fused = self._runner.fuse_aux(given.hidden)
        normed, recurrent = self._runner.forward(given.token_ids, given.positions, fused, extend_seen(batch, shape))
        gave = normed.index_select(0, given.select), recurrent.index_select(0, given.select)
        return carry(self._runner, self._ranking, draw, accepted, gave)


class _Again:
    """`Levels` by one runner, which reads the recurrent hidden that it returned at the level before."""

    def __init__(self, runner: DraftRunner, batch: Batch, carried: EagleDraftInput, shape: TreeShape) -> None:
        self._runner, self._batch, self._ancestry = runner, batch, Ancestry(carried, shape)
        # All K rows of level 1 follow the root, so all start from the hidden that the request carries.
        self._hidden = carried.hidden[:, None].expand(*carried.topk_index.shape, -1)

    def run(self, level: int, tokens: Tensor, parent: Tensor | None) -> ShardedLogits:
        bits = self._ancestry.descend(level, parent)
        hidden = after(self._hidden, parent)
        columns, self._hidden = run_level(self._runner, self._batch, level, tokens, hidden, bits)
        return columns


def run_level(
    runner: DraftRunner, batch: Batch, level: int, tokens: Tensor, hidden: Tensor, bits: Tensor
) -> tuple[ShardedLogits, Tensor]:
    """Run one level of K rows per request, `tokens` `[R, K]` with `hidden` `[R, K, H]`; return the rows' logits and
    recurrent hidden.

    `bits` `[R or 1, K, ceil(level K / 32)]` is the ancestor mask: bit j says whether a row sees window slot j.
    """
    r, k = tokens.shape
    # Row j of level l is in window slot (l - 1) K + j. These cells are temporary: extend writes the committed ones.
    write = batch.window[:, (level - 1) * k : level * k].reshape(-1)
    seen = AttentionMetadata(write, batch.tree(bits, level * k))
    positions = (batch.seq_lens + (level - 1)).repeat_interleave(k)
    rows = hidden.reshape(r * k, hidden.shape[-1])
    normed, recurrent = runner.forward(tokens.reshape(-1), positions, rows, seen)
    return runner.logits(normed), recurrent.view(r, k, recurrent.shape[-1])
