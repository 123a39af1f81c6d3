"""Draft: S - 1 forwards of R * K rows grow a tree from the proposals that the last extend left.

The K rows of a level are K rows of *one* request, so its prefix is read once, and every row sees exactly its own
ancestors among the window's slots. Legend: R requests, K topk, S depth, H draft width, Vd draft vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor

from cluster.attention.plan import window_group
from cluster.batch import AttentionPlan, Batch, SamplingBatch
from cluster.config import TreeShape
from cluster.forward.runner import DraftRunner
from cluster.forward.sampler import scores
from cluster.spec.extend import extend_input, extend_plan
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.tree import Candidates, DraftTree, best_tree, chain, clean
from cluster.spec.verify import Accepted


class Draft(Protocol):
    """What the step asks of a draft, whatever it is made of."""

    def draft(self, batch: Batch, carried: EagleDraftInput, noise: Tensor | None) -> DraftTree:
        """Trees for the R decoding requests; `noise` `[R, S + 2, V]` is keyed to positions seq_len + 1 onwards."""
        ...

    def extend(
        self, batch: Batch, accepted: Accepted, first: Tensor, features: list[Tensor], noise: Tensor | None
    ) -> EagleDraftInput:
        """Run the committed rows through the draft; carriers of the B requests for the next step.

        `first` `[F]` are the tokens chosen after finished prompts, `features` the target's hidden states `[T, Ht]`
        of all rows, `noise` `[B, V]` is keyed to the position after each request's bonus.
        """
        ...


class NoDraft:
    """Plain decoding as a tree of one node."""

    def draft(self, batch: Batch, carried: EagleDraftInput, noise: Tensor | None) -> DraftTree:
        """Trees that are only their root."""
        return chain(carried.bonus[:, None])

    def extend(
        self, batch: Batch, accepted: Accepted, first: Tensor, features: list[Tensor], noise: Tensor | None
    ) -> EagleDraftInput:
        """Carry the bonus only."""
        bonus = torch.cat([accepted.bonus, first])
        nothing = bonus.new_zeros(bonus.shape[0], 1)
        empty = features[0].new_zeros(bonus.shape[0], 0)
        return EagleDraftInput(nothing.to(empty.dtype), nothing, empty, bonus)


class EagleDraft:
    """An EAGLE-3 draft: one runner, run S - 1 times per step, and once over the committed rows."""

    def __init__(self, draft_runner_list: list[DraftRunner], shape: TreeShape, table: Tensor) -> None:
        """`table` is the slot table that target and draft share; pools are the runners' own."""
        (self._runner,) = draft_runner_list
        self._shape, self._table = shape, table
        self._target_ids = self._runner.model.target_ids

    def propose(self, logits: Tensor, sampling: SamplingBatch, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits `[B, n, Vd]` -> the K best (log-probability, target token id), `[B, n, K]` each.

        At T > 0 proposals are ranked with the *target's* noise (Gumbel coupling): where draft and target agree on the
        distribution they agree on the draw. `noise` is `[B, n, V]`.
        """
        if noise is not None:
            noise = noise.index_select(-1, self._target_ids)
        likely = scores(logits, sampling, noise).log_softmax(-1).topk(self._shape.topk, -1)
        return likely.values, self._target_ids[likely.indices]

    def draft(self, batch: Batch, carried: EagleDraftInput, noise: Tensor | None) -> DraftTree:
        """Trees `[R, N]` for the decoding requests; see `Draft.draft`."""
        r, k, steps = batch.decodes, self._shape.topk, self._shape.num_steps
        device, rows, sampling = carried.bonus.device, batch.decode_rows, batch.sampling.narrow(0, batch.decodes)
        tokens, score = carried.topk_index, clean(carried.topk_p)
        hidden = carried.hidden[:, None].expand(r, k, -1)
        number = torch.arange(k, device=device).expand(r, k)
        seen = torch.zeros(r, k, max(1, (steps - 1) * k), dtype=torch.bool, device=device)
        levels = [(tokens, score, torch.full_like(number, -1))]
        for level in range(1, steps):
            begin, end = (level - 1) * k, level * k
            seen[:, :, begin:end] = torch.eye(k, dtype=torch.bool, device=device)
            slots, bias = window_group(self._table, rows, batch.seq_lens, seen[:, :, :end], batch.longest, hidden.dtype)
            index = batch.seq_lens[:, None] + torch.arange(begin, end, device=device)
            plan = AttentionPlan.of_one(self._table[rows[:, None], index], r, k, slots, bias)
            positions = (batch.seq_lens + (level - 1))[:, None].expand(r, k).reshape(-1)
            normed, after = self._runner.forward(
                tokens.reshape(-1), positions, hidden.reshape(r * k, hidden.shape[-1]), plan
            )
            logits = self._runner.logits(normed).view(r, k, self._target_ids.shape[0])
            level_noise = None if noise is None else noise[:, level : level + 1]
            likely, proposed = self.propose(logits, sampling, level_noise)
            grown = (score[..., None] + clean(likely)).view(r, k * k)
            above = number[..., None].expand(r, k, k).reshape(r, k * k)
            levels.append((proposed.view(r, k * k), grown, above))
            if level == steps - 1:
                break
            score, pick = grown.topk(k, 1)
            parent = pick // k
            number = k + (level - 1) * k * k + pick
            tokens = proposed.view(r, k * k).gather(1, pick)
            after = after.view(r, k, after.shape[-1])
            hidden = after.gather(1, parent[..., None].expand(r, k, after.shape[-1]))
            seen = seen.gather(1, parent[..., None].expand_as(seen))
        if k == 1:
            return chain(torch.cat([carried.bonus[:, None], *(level[0] for level in levels)], 1))
        depths = [1] * k + [level + 1 for level in range(1, steps) for _ in range(k * k)]
        candidates = Candidates(
            tokens=torch.cat([level[0] for level in levels], 1),
            scores=torch.cat([level[1] for level in levels], 1),
            parents=torch.cat([level[2] for level in levels], 1),
            depths=torch.tensor(depths, device=device),
        )
        return best_tree(candidates, carried.bonus, self._shape.num_draft_tokens)

    def extend(
        self, batch: Batch, accepted: Accepted, first: Tensor, features: list[Tensor], noise: Tensor | None
    ) -> EagleDraftInput:
        """Run the committed rows through the draft; see `Draft.extend`."""
        given = extend_input(batch, accepted, first, features, self._shape)
        plan = extend_plan(batch, self._table, self._shape, given.hidden.dtype)
        fused = self._runner.fuse_aux(given.hidden)
        normed, recurrent = self._runner.forward(given.token_ids, given.positions, fused, plan)
        logits = self._runner.logits(normed.index_select(0, given.select))
        likely, proposed = self.propose(logits[:, None], batch.sampling, None if noise is None else noise[:, None])
        bonus = torch.cat([accepted.bonus, first])
        return EagleDraftInput(likely[:, 0], proposed[:, 0], recurrent.index_select(0, given.select), bonus)
