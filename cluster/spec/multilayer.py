"""A draft of several layers, each a runner of its own: runner i makes level i (MTP; upstream: SGLang #22954).

Rows are labelled so that every runner reads the same token at the same label. Runner i's row at label q takes the
embedding of token q + 1 and what runner i - 1 gave at q - 1: its output where the format chains, else what it was
given itself, so that in the end it is the target's hidden at q - i. That is how such layers are trained, shifted so
that all share slots. What a runner gave is kept by slot beside its pool, so chunks, cached prefixes and retraction need
nothing more. Labels below i do not exist for runner i; it does not look at them.

Legend: R requests, K topk, S depth, H draft width, T rows.
"""

from dataclasses import replace

import torch
from torch import Tensor

from cluster.attention.plan import HIDDEN, window_group
from cluster.batch import AttentionPlan, Batch, Group
from cluster.config import TreeShape
from cluster.forward.runner import DraftRunner
from cluster.kv.pool import zeros
from cluster.spec.draft import EagleDraft
from cluster.spec.extend import extend_input, extend_plan
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.tree import DraftTree, Growth, chain
from cluster.spec.verify import Accepted

LABEL = torch.int64


def kept_bytes(runners: int, hidden: int, dtype: torch.dtype) -> int:
    """Bytes that so many runners keep of one token beside their pools."""
    return runners * hidden * dtype.itemsize + LABEL.itemsize if runners > 1 else 0


class MultiLayerDraft(EagleDraft):
    """Drafts with a list of runners: at level l runner l runs the rows of levels 1 to l, so its own KV has them."""

    def __init__(self, draft_runner_list: list[DraftRunner], topk: int) -> None:
        """One runner per level; slots are shared with the target, pools and what runners gave are their own."""
        super().__init__(draft_runner_list[:1], topk)
        self._runners = draft_runner_list
        spec = self._runner.model.spec
        kv = self._runner.pool.kv
        slots = kv.shape[1]
        self._chained = spec.chained
        self._gave = [zeros((slots, spec.hidden), kv.dtype, kv.device) for _ in draft_runner_list]
        self._labels = zeros((slots,), LABEL, kv.device)

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """Copy what is kept beside the pools from slot `source[i]` onto `destination[i]`."""
        for kept in (*self._gave, self._labels):
            kept.index_copy_(0, destination, kept.index_select(0, source))

    def draft(self, batch: Batch, carried: EagleDraftInput, noise: Tensor | None, shape: TreeShape) -> DraftTree:
        """Trees `[R, N]` for the decoding requests; see `Draft.draft`."""
        if shape.num_steps == 0:
            return chain(carried.bonus[:, None])
        r, k, steps = batch.decodes, shape.topk, shape.num_steps
        grown = Growth(carried.topk_index, carried.topk_p)
        bias = carried.hidden.new_full((r, k, max(1, (steps - 1) * k)), HIDDEN)
        rows, biases = [carried.topk_index], [bias]
        parents: list[Tensor] = []
        gave = carried.hidden.new_zeros(r, 0, carried.hidden.shape[1])
        for level in range(1, steps):
            biases[-1][:, :, (level - 1) * k : level * k].diagonal(dim1=1, dim2=2).zero_()
            logits, gave = self._level(batch, level, rows, parents, biases, gave)
            level_noise = None if noise is None else noise[:, level : level + 1]
            likely, proposed = self.propose(logits, batch.sampling.narrow(0, r), level_noise)
            grown.add(proposed, likely)
            if level == steps - 1:
                break
            tokens, parent = grown.best()
            rows.append(tokens)
            parents.append(parent)
            biases.append(biases[-1].gather(1, parent[..., None].expand_as(bias)))
        return grown.tree(carried.bonus, shape.num_draft_tokens)

    def _level(
        self,
        batch: Batch,
        level: int,
        rows: list[Tensor],
        parents: list[Tensor],
        biases: list[Tensor],
        gave: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Runner `level` over the rows of all levels so far, given what the runner before gave at the levels before it,
        `[R, (level - 1) K, H]` -> logits of the last level `[R, K, Vd]`, and what it gave itself `[R, level K, H]`.
        """
        r, k = rows[0].shape
        count, runner = level * k, self._runners[level]
        root = self._gave[level - 1].index_select(0, last_slots(batch))
        sources = [root[:, None].expand(r, k, -1)]
        for j, parent in enumerate(parents):
            before = gave[:, j * k : (j + 1) * k]
            sources.append(before.gather(1, parent[..., None].expand_as(before)))
        source = torch.cat(sources, 1).reshape(r * count, root.shape[-1])
        depth = torch.arange(level, device=source.device).repeat_interleave(k)
        positions = (batch.seq_lens[:, None] + depth).reshape(-1)
        write = batch.reach.window[:, :count].reshape(-1)
        bias = torch.cat([each[:, :, :count] for each in biases], 1)
        plan = AttentionPlan.of(write, window_group(batch.reach, bias, slice(0, r * count)))
        self._labels.index_copy_(0, write, positions)
        tokens = torch.cat(rows, 1).reshape(-1)
        normed, recurrent = runner.forward(tokens, positions, source, self._seen(plan, positions, level))
        last = normed.view(r, count, normed.shape[-1])[:, count - k :]
        logits = runner.logits(last.reshape(r * k, last.shape[-1])).view(r, k, self._target_ids.shape[0])
        return logits, (recurrent if self._chained else source).view(r, count, root.shape[-1])

    def extend(
        self, batch: Batch, accepted: Accepted, features: list[Tensor], noise: Tensor | None, shape: TreeShape
    ) -> EagleDraftInput:
        """Run the committed rows through every runner; see `Draft.extend`."""
        given = extend_input(batch, accepted, features, shape)
        plan = extend_plan(batch, shape, given.hidden.dtype)
        before = slots_before(plan, given.positions)
        self._labels.index_copy_(0, plan.write, given.positions)
        source = self._runner.fuse_aux(given.hidden)
        outputs = []
        for i, runner in enumerate(self._runners):
            seen = self._seen(plan, given.positions, i)
            outputs.append(runner.forward(given.token_ids, given.positions, source, seen))
            self._gave[i].index_copy_(0, plan.write, outputs[-1][1] if self._chained else source)
            source = self._gave[i].index_select(0, before).masked_fill_((given.positions == 0)[:, None], 0)
        normed, recurrent = outputs[0]
        return self._carry(batch, accepted, normed[given.select], recurrent[given.select], noise)

    def _seen(self, plan: AttentionPlan, positions: Tensor, runner: int) -> AttentionPlan:
        """The plan without labels below `runner`, for the rows that exist for it; the others are nobody's concern."""
        if runner == 0:
            return plan
        return AttentionPlan(plan.write, tuple(self._without(group, positions, runner) for group in plan.groups))

    def _without(self, group: Group, positions: Tensor, runner: int) -> Group:
        early = self._labels[group.slots] < runner
        real = positions[group.rows].view(group.requests, group.q_rows) >= runner
        return replace(group, bias=group.bias.masked_fill(early[:, None] & real[..., None], HIDDEN))


def last_slots(batch: Batch) -> Tensor:
    """The slot of each decoding request's last committed token, `[R]`; an idle request's is the sink."""
    prefix = batch.reach.prefix
    if not prefix.shape[1]:
        return prefix.new_zeros(prefix.shape[0])
    return prefix.gather(1, (batch.seq_lens[:, None] - 1).clamp(min=0))[:, 0]


def slots_before(plan: AttentionPlan, positions: Tensor) -> Tensor:
    """The slot of the token before each row, `[T]`, of rows that lie in order per request; any slot at position 0."""
    parts = [plan.write[:0]]
    for group in plan.groups:
        write = plan.write[group.rows].view(group.requests, group.q_rows)
        first = positions[group.rows].view(group.requests, group.q_rows)[:, :1]
        ahead = group.slots.gather(1, (first - 1).clamp(min=0))
        flat = torch.cat([ahead, write[:, :-1]], 1).view(-1)
        parts.append(flat if group.back is None else flat[group.back])
    return torch.cat(parts)
