"""A draft of several layers, each a runner of its own: runner i makes level i (MTP; upstream: SGLang #22954).

A row's label is its position. All runners read the same token at the same label, so that they share slots: runner i's
row at label q takes the embedding of token q + 1 and the hidden that runner i - 1 passed on at label q - 1: its output
if the format is `chained`, else its own input, so in the end the target's hidden at q - i. Such layers are trained like
this, without the shift. What a runner passes on is kept by slot beside its pool, so that chunks, cached prefixes and
retraction need nothing more. Runner i has no rows at labels below i and masks them.

Legend: R requests, K topk, S depth, H draft width, T rows.
"""

from dataclasses import replace

import torch
from torch import Tensor

from cluster.attention.plan import MASKED, window_group
from cluster.batch import AttentionPlan, Batch, Group
from cluster.config import TreeShape
from cluster.forward.noise import Noise
from cluster.forward.runner import DraftRunner
from cluster.kv.pool import zeros
from cluster.models.vocab import Columns
from cluster.spec.extend import extend_input, extend_plan
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.levels import Ancestry, after, grow
from cluster.spec.propose import Ranking, carry
from cluster.spec.tree import DraftTree, chain
from cluster.spec.verify import Accepted

LABEL = torch.int64


def kept_bytes(runners: int, hidden: int, dtype: torch.dtype) -> int:
    """Bytes that `runners` runners keep of one token beside their pools."""
    return runners * hidden * dtype.itemsize + LABEL.itemsize if runners > 1 else 0


class MultiLayerDraft:
    """Drafts with a list of runners: at level l runner l runs the rows of levels 1 to l, so its own KV has them.

    Slots are shared with the target; pools, and what runners pass on (`_gave`), are their own.
    """

    def __init__(self, draft_runner_list: list[DraftRunner], ranking: Ranking) -> None:
        """One runner per level."""
        self._runners, self._ranking = draft_runner_list, ranking
        first = draft_runner_list[0]
        spec, kv = first.model.spec, first.pool.kv
        slots = kv.shape[1]
        self._chained = spec.chained
        self._gave = [zeros((slots, spec.hidden), kv.dtype, kv.device) for _ in draft_runner_list]
        self._labels = zeros((slots,), LABEL, kv.device)

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """Copy what is kept beside the pools from slot `source[i]` onto `destination[i]`."""
        for kept in (*self._gave, self._labels):
            kept.index_copy_(0, destination, kept.index_select(0, source))

    def draft(self, batch: Batch, carried: EagleDraftInput, noise: Noise | None, shape: TreeShape) -> DraftTree:
        """Trees `[R, N]` for the decoding requests; see `Draft.draft`."""
        if shape.num_steps == 0:
            return chain(carried.bonus[:, None])
        return grow(batch, carried, noise, shape, self._ranking, _OneEach(self, batch, carried, shape))

    def run_level(
        self, batch: Batch, level: int, tokens: Tensor, source: Tensor, bias: Tensor
    ) -> tuple[Columns, Tensor]:
        """Runner `level` over the rows of all levels so far, `tokens` `[R, level K]` and their hidden `source`
        `[R, level K, H]` -> logits of the R K rows of the last level, and what the runner passes on `[R, level K, H]`.
        """
        (r, count), runner = tokens.shape, self._runners[level]
        k = count // level
        depth = torch.arange(level, device=source.device).repeat_interleave(k)
        positions = (batch.seq_lens[:, None] + depth).reshape(-1)
        write = batch.reach.window[:, :count].reshape(-1)
        plan = AttentionPlan.of(write, window_group(batch.reach, bias, slice(0, r * count)))
        self._labels.index_copy_(0, write, positions)
        rows = source.reshape(r * count, source.shape[-1])
        normed, recurrent = runner.forward(tokens.reshape(-1), positions, rows, self._seen(plan, positions, level))
        last = normed.view(r, count, normed.shape[-1])[:, count - k :]
        columns = runner.logits(last.reshape(r * k, last.shape[-1]))
        return columns, (recurrent if self._chained else rows).view(source.shape)

    def given_at_root(self, batch: Batch, level: int) -> Tensor:
        """What runner `level` - 1 passed on at each request's last committed token, `[R, H]`."""
        return self._gave[level - 1].index_select(0, last_slots(batch))

    def extend(
        self, batch: Batch, accepted: Accepted, features: list[Tensor], noise: Noise | None, shape: TreeShape
    ) -> EagleDraftInput:
        """Run the committed rows through every runner; see `Draft.extend`."""
        given = extend_input(batch, accepted, features, shape)
        plan = extend_plan(batch, shape, given.hidden.dtype)
        before = slots_before(plan, given.positions)
        self._labels.index_copy_(0, plan.write, given.positions)
        source = self._runners[0].fuse_aux(given.hidden)
        outputs = []
        for i, runner in enumerate(self._runners):
            seen = self._seen(plan, given.positions, i)
            outputs.append(runner.forward(given.token_ids, given.positions, source, seen))
            self._gave[i].index_copy_(0, plan.write, outputs[-1][1] if self._chained else source)
            source = self._gave[i].index_select(0, before).masked_fill_((given.positions == 0)[:, None], 0)
        normed, recurrent = outputs[0]
        gave = normed[given.select], recurrent[given.select]
        return carry(self._runners[0], self._ranking, batch.sampling, accepted, gave, noise)

    def _seen(self, plan: AttentionPlan, positions: Tensor, runner: int) -> AttentionPlan:
        """The plan with labels below `runner` masked for rows at or above it; the output of other rows is not used."""
        if runner == 0:
            return plan
        return AttentionPlan(plan.write, tuple(self._without(group, positions, runner) for group in plan.groups))

    def _without(self, group: Group, positions: Tensor, runner: int) -> Group:
        early = self._labels[group.slots] < runner
        real = positions[group.rows].view(group.requests, group.q_rows) >= runner
        return replace(group, bias=group.bias.masked_fill(early[:, None] & real[..., None], MASKED))


class _OneEach:
    """`Levels` by a runner each: it runs the rows of all levels so far, on what the one before passed on."""

    def __init__(self, draft: MultiLayerDraft, batch: Batch, carried: EagleDraftInput, shape: TreeShape) -> None:
        self._draft, self._batch, self._ancestry = draft, batch, Ancestry(carried, shape)
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._biases: list[Tensor] = []
        self._gave: Tensor | None = None

    def run(self, level: int, tokens: Tensor, parent: Tensor | None) -> Columns:
        r, k = tokens.shape
        self._tokens.append(tokens)
        self._biases.append(self._ancestry.descend(level, parent))
        if parent is not None:
            self._parents.append(parent)
        sources = [self._draft.given_at_root(self._batch, level)[:, None].expand(r, k, -1)]
        for j, above in enumerate(self._parents):
            assert self._gave is not None, "the level before gave something"
            sources.append(after(self._gave[:, j * k : (j + 1) * k], above))
        bias = torch.cat([each[:, :, : level * k] for each in self._biases], 1)
        rows, source = torch.cat(self._tokens, 1), torch.cat(sources, 1)
        columns, self._gave = self._draft.run_level(self._batch, level, rows, source, bias)
        return columns


def last_slots(batch: Batch) -> Tensor:
    """The slot of each decoding request's last committed token, `[R]`; an idle request's is the sink."""
    prefix = batch.reach.prefix
    if not prefix.shape[1]:
        return prefix.new_zeros(prefix.shape[0])
    return prefix.gather(1, (batch.seq_lens[:, None] - 1).clamp(0, prefix.shape[1] - 1))[:, 0]


def slots_before(plan: AttentionPlan, positions: Tensor) -> Tensor:
    """The slot of the token before each row, `[T]`; rows are in order per request. At position 0 any slot."""
    parts = [plan.write[:0]]
    for group in plan.groups:
        write = plan.write[group.rows].view(group.requests, group.q_rows)
        first = positions[group.rows].view(group.requests, group.q_rows)[:, :1]
        ahead = group.slots.gather(1, (first - 1).clamp(0, group.slots.shape[1] - 1))
        flat = torch.cat([ahead, write[:, :-1]], 1).view(-1)
        parts.append(flat if group.back is None else flat[group.back])
    return torch.cat(parts)
