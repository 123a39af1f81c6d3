"""Draft: S - 1 forwards of R K rows grow a tree from the proposals that the extend phase of the last step made.

To attention, the K rows of a level are K rows of *one* request: the request's prefix is read once, and a mask lets
every row see only its own ancestors in the window (the request's KV slots from position seq_len on). A draft row at
position p reads the token at p + 1 (the EAGLE shift). So the rows of level l, whose tokens are at seq_len + l, are at
position seq_len + l - 1.

Legend: R requests, K topk, S depth, N tree nodes, H draft width, Vd draft vocabulary.
"""

from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.attention.ancestor_bits import chain_bits
from cluster.batch import AttentionMetadata, Batch
from cluster.config.tree_shape import TreeShape
from cluster.models.runner import DraftRunner
from cluster.models.vocab import ShardedLogits
from cluster.sampling.noise import at_least_float32
from cluster.sampling.sampling_inputs import PhaseSampling, SamplingInputs
from cluster.spec.chances import NodeChances
from cluster.spec.extend import extend_attention, extend_input
from cluster.spec.inputs import EagleDraftExtendInput, EagleDraftInput
from cluster.spec.levels import BY_PROBABILITY, Ancestry, GrowthSettings, gather_by_parent, grow
from cluster.spec.propose import Ranking, next_draft_input
from cluster.spec.tree import DraftTree, Proposed, chain, chain_scores
from cluster.spec.verify import Accepted


class Draft(Protocol):
    """The draft phase and the extend phase of a step."""

    def draft(
        self, batch: Batch, draft_input: EagleDraftInput, phase_sampling: PhaseSampling, shape: TreeShape
    ) -> DraftTree:
        """Return trees of `shape` for the R decoding requests; the root (the bonus) is at position seq_len."""
        ...

    def extend(
        self,
        batch: Batch,
        accepted: Accepted,
        target_hidden: list[Tensor],
        sampling_inputs: SamplingInputs,
        shape: TreeShape,
    ) -> EagleDraftInput:
        """Run the newly committed tokens through the draft; return what the B requests carry to the next step.

        `target_hidden` has one tensor for each of the target's layers whose hidden states the draft reads. Each tensor
        has all rows of the target's forward: tree rows, then prompt rows. `sampling_inputs` say how the token after
        each request's bonus is sampled.
        """
        ...


@runtime_checkable
class CanRest(Protocol):
    """A draft that may skip the tokens of steps without trees, and read them later; see `spec/resting.py`."""

    def rest(self, batch: Batch, accepted: Accepted, target_hidden: list[Tensor]) -> None:
        """Keep what the draft will have to read later; `accepted` and `target_hidden` as in `Draft.extend`."""
        ...


@runtime_checkable
class HasChances(Protocol):
    """A draft that may choose tree nodes by their learned chances of acceptance; see `spec/chances.py`. If `chances` is
    None, it goes by its own probabilities.
    """

    chances: NodeChances | None


class NoDraft:
    """Plain decoding: a tree of one node, and nothing to extend."""

    def draft(
        self, batch: Batch, draft_input: EagleDraftInput, phase_sampling: PhaseSampling, shape: TreeShape
    ) -> DraftTree:
        """Return trees that are only their root."""
        return chain(draft_input.bonus[:, None])

    def extend(
        self,
        batch: Batch,
        accepted: Accepted,
        target_hidden: list[Tensor],
        sampling_inputs: SamplingInputs,
        shape: TreeShape,
    ) -> EagleDraftInput:
        """Carry the bonus only; the other fields are empty or zero."""
        bonus = accepted.bonus
        zeros = bonus.new_zeros(bonus.shape[0], 1)
        no_hidden = target_hidden[0].new_zeros(bonus.shape[0], 0)
        return EagleDraftInput(zeros.to(at_least_float32(no_hidden.dtype)), zeros, no_hidden, bonus)


class EagleDraft:
    """A draft of one runner (EAGLE-1 to 3, one MTP layer), run S - 1 times to draft and once to extend.

    S and N may differ from step to step. K is fixed, because an `EagleDraftInput` holds K proposals. The runner has its
    own KV pool, but uses the same slot numbers as the target.
    """

    def __init__(self, runner: DraftRunner, ranking: Ranking, growth: GrowthSettings = BY_PROBABILITY) -> None:
        self._runner, self._ranking, self._growth = runner, ranking, growth
        self.chances = growth.chances

    def draft(
        self, batch: Batch, draft_input: EagleDraftInput, phase_sampling: PhaseSampling, shape: TreeShape
    ) -> DraftTree:
        """Return trees `[R, N]` for the decoding requests; see `Draft.draft`."""
        if shape.num_steps == 0:
            return chain(draft_input.bonus[:, None])
        if shape.topk == 1:
            return self._draft_chain(batch, draft_input, phase_sampling, shape)
        level_runner = _RecurrentLevels(self._runner, batch, draft_input, shape)
        return grow(draft_input, phase_sampling, shape, self._ranking, level_runner, self._growth)

    def _draft_chain(
        self, batch: Batch, draft_input: EagleDraftInput, phase_sampling: PhaseSampling, shape: TreeShape
    ) -> DraftTree:
        """Return the trees of topk 1: every level has one row, which sees all rows before it. `grow` would return the
        same more slowly, because it ranks candidates across levels.
        """
        tokens, hidden = draft_input.topk_index, draft_input.hidden[:, None]
        path, log_probabilities = [draft_input.bonus[:, None], tokens], [draft_input.topk_logprobs]
        for level in range(1, shape.num_steps):
            bits = chain_bits(1, level, tokens.device)
            logits, hidden = run_level(self._runner, batch, level, tokens, hidden, bits)
            # Penalties and grammars need the drafted tokens of the path, without the bonus.
            drafted_path = None if phase_sampling.processor is None else torch.cat(path[1:], 1)[:, None]
            level_scores, proposals = self._ranking.propose(logits, phase_sampling.at_position(level, 1, drafted_path))
            # `[R, 1, 1]` -> `[R, 1]`: the one proposal is the next level's row.
            tokens = proposals[:, 0]
            path.append(tokens)
            log_probabilities.append(level_scores[:, 0])
        tree = chain(torch.cat(path, 1))
        if not shape.max_nodes:
            return tree
        # The requests share the rows of the step: nodes of all chains, and looked-up tokens (`spec/lookup.py`), compete
        # for rows by score.
        proposed = Proposed(F.pad(torch.cat(log_probabilities, 1), (1, 0)), torch.ones_like(tree.tokens).bool())
        log_chances = proposed.log_probabilities[:, 1:]
        if self.chances is not None:
            sampled = phase_sampling.sampling.noise_scale > 0
            log_chances = self.chances.log_chances(log_chances[..., None], sampled)[..., 0]
        return replace(tree, scores=chain_scores(log_chances), proposed=proposed)

    def extend(
        self,
        batch: Batch,
        accepted: Accepted,
        target_hidden: list[Tensor],
        sampling_inputs: SamplingInputs,
        shape: TreeShape,
    ) -> EagleDraftInput:
        """Run the newly committed tokens through the draft; see `Draft.extend`."""
        extend_rows = extend_input(batch, accepted, target_hidden, shape, self._runner.model.spec)
        return self.read(extend_rows, extend_attention(batch, shape), sampling_inputs, accepted)

    def read(
        self,
        extend_rows: EagleDraftExtendInput,
        attention: AttentionMetadata,
        sampling_inputs: SamplingInputs,
        accepted: Accepted,
    ) -> EagleDraftInput:
        """Run `extend_rows` through the draft; return the draft inputs that the outputs of the rows `select` give."""
        # Here `fuse_aux` maps the target's hidden `[T, A]` to the draft's `[T, H]`. In the draft phase, the draft reads
        # its own recurrent hidden instead.
        fused_hidden = self._runner.fuse_aux(extend_rows.hidden)
        normed, recurrent = self._runner.forward(extend_rows.token_ids, extend_rows.positions, fused_hidden, attention)
        extend_output = normed.index_select(0, extend_rows.select), recurrent.index_select(0, extend_rows.select)
        return next_draft_input(self._runner, self._ranking, sampling_inputs, accepted, extend_output)


class _RecurrentLevels:
    """A `LevelRunner` that runs all levels with one runner. For each row, the runner reads the recurrent hidden that it
    returned for the row's parent, in the level before.
    """

    def __init__(self, runner: DraftRunner, batch: Batch, draft_input: EagleDraftInput, shape: TreeShape) -> None:
        self._runner, self._batch, self._ancestry = runner, batch, Ancestry(draft_input, shape)
        # All K rows of level 1 follow the root, so all read the same hidden: that of `draft_input`.
        self._hidden = draft_input.hidden[:, None].expand(*draft_input.topk_index.shape, -1)

    def run(self, level: int, tokens: Tensor, parent: Tensor | None) -> ShardedLogits:
        bits = self._ancestry.descend(level, parent)
        hidden = gather_by_parent(self._hidden, parent)
        logits, self._hidden = run_level(self._runner, self._batch, level, tokens, hidden, bits)
        return logits


def run_level(
    runner: DraftRunner, batch: Batch, level: int, tokens: Tensor, hidden: Tensor, bits: Tensor
) -> tuple[ShardedLogits, Tensor]:
    """Run one level of K rows per request, `tokens` `[R, K]` with `hidden` `[R, K, H]`; return the rows' logits and
    recurrent hidden.

    `bits` `[R or 1, K, ceil(level K / 32)]` is the ancestor mask: bit j says whether a row sees window slot j. A draft
    that keeps no KV sees no slots of the window, and the rows of all its levels are at the position of level 1.
    """
    r, k = tokens.shape
    # Row j of level l is in window slot (l - 1) K + j. The KV written here is temporary: the extend phase writes the KV
    # of committed tokens.
    written_slots = batch.window[:, (level - 1) * k : level * k].reshape(-1)
    if runner.model.spec.keeps_kv:
        positions = batch.seq_lens + (level - 1)
    else:
        positions = batch.seq_lens - 1
        # Idle requests have no committed tokens. They see their nodes, because attention to nothing may give NaN.
        bits = bits.masked_fill(batch.seq_lens[:, None, None] > 0, 0)
    attention = AttentionMetadata(written_slots, batch.tree(bits, level * k))
    hidden_rows = hidden.reshape(r * k, hidden.shape[-1])
    normed, recurrent = runner.forward(tokens.reshape(-1), positions.repeat_interleave(k), hidden_rows, attention)
    return runner.logits(normed), recurrent.view(r, k, recurrent.shape[-1])
