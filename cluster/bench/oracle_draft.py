"""A draft that is told the truth as far as asked, so that any accept length can be measured, whatever its weights are.

All forwards of the real draft run, and so does its choice of a tree; only then is the tree replaced by one of the same
size whose nodes are right along one path, as deep as the accept length asks for, and wrong elsewhere. It is all on the
device, from tables made beforehand, so steps can be captured and nothing waits for the host.

Legend: R requests, N nodes, S depth, L tokens of a text.
"""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from cluster.batch import Batch
from cluster.config.tree_shape import TreeShape
from cluster.sampling.sampling_inputs import PhaseSampling, SamplingInputs
from cluster.spec.draft import Draft
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.tree import DraftTree, ancestors_of
from cluster.spec.verify import Accepted

LUCK = 4093  # numbers of the table that decides between two depths; a prime, so that steps of any length visit all


class Truth(Protocol):
    """What the target is going to say."""

    def after(self, batch: Batch, bonus: Tensor, count: int) -> Tensor:
        """The bonus of each decoding request, and the `count` tokens after it, `[R, count + 1]`."""
        ...


class Counting:
    """The truth of a target that always says the next token id (`made_up`)."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def after(self, batch: Batch, bonus: Tensor, count: int) -> Tensor:
        """See `Truth.after`."""
        return (bonus[:, None] + torch.arange(count + 1, device=bonus.device)) % self._vocab


class WrittenTruth:
    """The truth as `texts` `[n, L]`, prompts included; the request with seed i writes text i."""

    def __init__(self, texts: Tensor) -> None:
        self._texts = texts

    def after(self, batch: Batch, bonus: Tensor, count: int) -> Tensor:
        """See `Truth.after`; beyond a text's end its last token stands for all."""
        texts, length = self._texts.shape
        which = batch.sampling.seeds[: batch.decodes].remainder(texts)
        at = batch.seq_lens[:, None] + torch.arange(count + 1, device=bonus.device)
        return self._texts.index_select(0, which).gather(1, at.clamp(max=length - 1))


@dataclass(frozen=True, slots=True)
class TreeTemplate:
    """A tree of N nodes: `parents` and `depths` `[N]`, `ancestors` `[N, N]`, and which nodes are on its path, `[N]`."""

    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    path: Tensor


@cache
def template(num_steps: int, nodes: int, device: torch.device) -> TreeTemplate:
    """One path of `num_steps` nodes; what is left of N are more children of the path's nodes, in turn."""
    deepest = min(num_steps, nodes - 1)
    parents = [0, *range(deepest), *((node % max(1, deepest)) for node in range(nodes - 1 - deepest))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    above = torch.tensor(parents, device=device)
    path = torch.arange(nodes, device=device) <= deepest
    return TreeTemplate(above, torch.tensor(depths, device=device), ancestors_of(above[None], deepest)[0], path)


class OracleDraft:
    """A `Draft` whose trees are accepted with `accept_length` tokens a step on average, the bonus included.

    Without rounding: a target that chooses otherwise than the truth says, as one in half precision may, accepts less.
    """

    def __init__(self, inner: Draft, truth: Truth, accept_length: float, vocab: int, device: torch.device) -> None:
        self._inner, self._truth, self._wanted, self._vocab = inner, truth, accept_length - 1, vocab
        self._luck = torch.rand(LUCK, generator=torch.Generator().manual_seed(0)).to(device)

    def draft(self, batch: Batch, carried: EagleDraftInput, drawing: PhaseSampling, shape: TreeShape) -> DraftTree:
        """See `Draft.draft`."""
        tree = self._inner.draft(batch, carried, drawing, shape)
        (r, n), steps = tree.tokens.shape, shape.num_steps
        if not steps:
            return tree
        made = template(steps, n, tree.tokens.device)
        truth = self._truth.after(batch, carried.bonus, steps).index_select(1, made.depths)
        luck = self._luck.index_select(0, (batch.seq_lens + 7 * batch.decode_rows) % LUCK)
        right = made.path & (made.depths <= (luck + self._wanted)[:, None])  # so deep, or one deeper
        wrong = torch.where(tree.tokens == truth, (truth + 1) % self._vocab, tree.tokens)
        tokens = torch.where(right, truth, wrong)
        shapes = made.parents.expand(r, n), made.depths.expand(r, n), made.ancestors.expand(r, n, n)
        return DraftTree(tokens, *shapes)

    def extend(
        self, batch: Batch, accepted: Accepted, features: list[Tensor], draw: SamplingInputs, shape: TreeShape
    ) -> EagleDraftInput:
        """See `Draft.extend`."""
        return self._inner.extend(batch, accepted, features, draw, shape)
