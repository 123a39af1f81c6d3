"""Draft: S - 1 forwards of R * K rows grow a tree from the proposals that the last extend left.

The K rows of a level are K rows of *one* request, so its prefix is read once, and every row sees exactly its own
ancestors among the window's slots. Legend: R requests, K topk, S depth, H draft width, Vd draft vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor

from cluster.attention.plan import HIDDEN, window_group
from cluster.batch import AttentionPlan, Batch, SamplingBatch
from cluster.config import TreeShape
from cluster.forward.runner import DraftRunner
from cluster.forward.sampler import at_least_float32, scores
from cluster.spec.extend import extend_input, extend_plan
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.tree import DraftTree, Growth, chain
from cluster.spec.verify import Accepted


class Draft(Protocol):
    """What the step asks of a draft, whatever it is made of."""

    def draft(self, batch: Batch, carried: EagleDraftInput, noise: Tensor | None, shape: TreeShape) -> DraftTree:
        """Trees of `shape` for the R decoding requests; `noise` `[R, S + 2, V]` is keyed to seq_len + 1 onwards."""
        ...

    def extend(
        self, batch: Batch, accepted: Accepted, features: list[Tensor], noise: Tensor | None, shape: TreeShape
    ) -> EagleDraftInput:
        """Run the committed rows through the draft; carriers of the B requests for the next step.

        `features` are the target's hidden states `[T, Ht]` of all rows, `noise` `[B, V]` is keyed to the position
        after each request's bonus.
        """
        ...


class NoDraft:
    """Plain decoding as a tree of one node."""

    def draft(self, batch: Batch, carried: EagleDraftInput, noise: Tensor | None, shape: TreeShape) -> DraftTree:
        """Trees that are only their root."""
        return chain(carried.bonus[:, None])

    def extend(
        self, batch: Batch, accepted: Accepted, features: list[Tensor], noise: Tensor | None, shape: TreeShape
    ) -> EagleDraftInput:
        """Carry the bonus only."""
        bonus = accepted.bonus
        nothing = bonus.new_zeros(bonus.shape[0], 1)
        empty = features[0].new_zeros(bonus.shape[0], 0)
        return EagleDraftInput(nothing.to(at_least_float32(empty.dtype)), nothing, empty, bonus)


class EagleDraft:
    """An EAGLE-3 draft: one runner, run S - 1 times per step, and once over the committed rows.

    S and N may differ from step to step (the plan's tier), K may not: carriers hold K proposals.
    """

    def __init__(self, draft_runner_list: list[DraftRunner], topk: int) -> None:
        """One runner in the list; slots are shared with the target, pools are the runners' own."""
        (self._runner,) = draft_runner_list
        self._topk = topk
        self._target_ids = self._runner.model.target_ids

    def propose(self, logits: Tensor, sampling: SamplingBatch, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits `[B, n, Vd]` -> the K best (log-probability, target token id), `[B, n, K]` each.

        At T > 0 proposals are ranked with the *target's* noise (Gumbel coupling): where draft and target agree on the
        distribution they agree on the draw. `noise` is `[B, n, V]`.
        """
        if noise is not None:
            noise = noise.index_select(-1, self._target_ids)
        ranked = scores(logits, sampling, noise)
        likely = ranked.log_softmax(-1, dtype=at_least_float32(ranked.dtype)).topk(self._topk, -1)
        return likely.values, self._target_ids[likely.indices]

    def draft(self, batch: Batch, carried: EagleDraftInput, noise: Tensor | None, shape: TreeShape) -> DraftTree:
        """Trees `[R, N]` for the decoding requests; see `Draft.draft`."""
        if shape.num_steps == 0:
            return chain(carried.bonus[:, None])
        return (self._chain if shape.topk == 1 else self._tree)(batch, carried, noise, shape)

    def _forward(
        self, batch: Batch, level: int, tokens: Tensor, hidden: Tensor, bias: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One level: K rows per request -> (log-probability, token) of their proposals `[R, K, K]`, hidden `[R, K, H]`.

        `bias` `[R, K, level * K]` says which earlier rows of the window each row sees.
        """
        r, k = tokens.shape
        write = batch.reach.window[:, (level - 1) * k : level * k].reshape(-1)
        plan = AttentionPlan.of(write, window_group(batch.reach, bias, slice(0, r * k)))
        positions = (batch.seq_lens + (level - 1)).repeat_interleave(k)
        rows = hidden.reshape(r * k, hidden.shape[-1])
        normed, after = self._runner.forward(tokens.reshape(-1), positions, rows, plan)
        logits = self._runner.logits(normed).view(r, k, self._target_ids.shape[0])
        level_noise = None if noise is None else noise[:, level : level + 1]
        likely, proposed = self.propose(logits, batch.sampling.narrow(0, r), level_noise)
        return likely, proposed, after.view(r, k, after.shape[-1])

    def _chain(self, batch: Batch, carried: EagleDraftInput, noise: Tensor | None, shape: TreeShape) -> DraftTree:
        """The tree of topk 1: every level has one row, which sees all before it."""
        tokens, hidden = carried.topk_index, carried.hidden[:, None]
        seen = hidden.new_zeros(1, 1, shape.num_steps)
        path = [carried.bonus[:, None], tokens]
        for level in range(1, shape.num_steps):
            _, proposed, hidden = self._forward(batch, level, tokens, hidden, seen[:, :, :level], noise)
            tokens = proposed[:, 0]
            path.append(tokens)
        return chain(torch.cat(path, 1))

    def _tree(self, batch: Batch, carried: EagleDraftInput, noise: Tensor | None, shape: TreeShape) -> DraftTree:
        """EAGLE-2's dynamic tree: each level keeps the K best rows by cumulative score, the end the N - 1 best."""
        r, k, steps = batch.decodes, shape.topk, shape.num_steps
        tokens, hidden = carried.topk_index, carried.hidden[:, None].expand(r, k, -1)
        grown = Growth(tokens, carried.topk_p)
        bias = hidden.new_full((r, k, max(1, (steps - 1) * k)), HIDDEN)
        for level in range(1, steps):
            bias[:, :, (level - 1) * k : level * k].diagonal(dim1=1, dim2=2).zero_()
            likely, proposed, after = self._forward(batch, level, tokens, hidden, bias[:, :, : level * k], noise)
            grown.add(proposed, likely)
            if level == steps - 1:
                break
            tokens, parent = grown.best()
            hidden = after.gather(1, parent[..., None].expand_as(after))
            bias = bias.gather(1, parent[..., None].expand_as(bias))
        return grown.tree(carried.bonus, shape.num_draft_tokens)

    def extend(
        self, batch: Batch, accepted: Accepted, features: list[Tensor], noise: Tensor | None, shape: TreeShape
    ) -> EagleDraftInput:
        """Run the committed rows through the draft; see `Draft.extend`."""
        given = extend_input(batch, accepted, features, shape)
        plan = extend_plan(batch, shape, given.hidden.dtype)
        fused = self._runner.fuse_aux(given.hidden)
        normed, recurrent = self._runner.forward(given.token_ids, given.positions, fused, plan)
        return self._carry(batch, accepted, normed[given.select], recurrent[given.select], noise)

    def _carry(
        self, batch: Batch, accepted: Accepted, normed: Tensor, recurrent: Tensor, noise: Tensor | None
    ) -> EagleDraftInput:
        """What the draft gave at each request's last row, `[B, H]` for the head and recurrent -> carriers."""
        logits = self._runner.logits(normed)[:, None]
        likely, proposed = self.propose(logits, batch.sampling, None if noise is None else noise[:, None])
        return EagleDraftInput(likely[:, 0], proposed[:, 0], recurrent, accepted.bonus)
