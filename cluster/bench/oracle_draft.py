"""An oracle draft: synthetic acceptance at any accept length, whatever the draft's weights are.

The real draft runs all its forwards and chooses a tree. That tree is then replaced by a tree of the same size: correct
tokens along one path, as deep as the wanted accept length, and wrong tokens elsewhere. All work is done on the device,
from tables made beforehand, so steps can be captured and never wait for the host.

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

LUCK = 4093  # size of a table of random numbers; each chooses between two depths. Prime, so any stride visits all


class Truth(Protocol):
    """Tells which tokens the target is going to choose."""

    def after(self, batch: Batch, bonus: Tensor, count: int) -> Tensor:
        """Return each decoding request's bonus token and the `count` tokens after it, `[R, count + 1]`."""
        ...


class Counting:
    """The truth of a target that always chooses the next token id (`random_models`)."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def after(self, batch: Batch, bonus: Tensor, count: int) -> Tensor:
        """Return consecutive token ids from the bonus on, modulo the vocabulary."""
        return (bonus[:, None] + torch.arange(count + 1, device=bonus.device)) % self._vocab


class WrittenTruth:
    """The truth from `texts` `[n, L]`, which include the prompts. The request with seed i generates text i."""

    def __init__(self, texts: Tensor) -> None:
        self._texts = texts

    def after(self, batch: Batch, bonus: Tensor, count: int) -> Tensor:
        """Return the tokens at each request's position in its text. Beyond the text's end, its last token repeats."""
        texts, length = self._texts.shape
        which = batch.sampling.seeds[: batch.decodes].remainder(texts)
        at = batch.seq_lens[:, None] + torch.arange(count + 1, device=bonus.device)
        return self._texts.index_select(0, which).gather(1, at.clamp(max=length - 1))


@dataclass(frozen=True, slots=True)
class TreeTemplate:
    """A tree of N nodes: `parents` and `depths` `[N]`, `ancestors` `[N, N]`; `path` `[N]` marks the correct path."""

    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    path: Tensor


@cache
def template(num_steps: int, nodes: int, device: torch.device) -> TreeTemplate:
    """Return a tree with one path of `num_steps` nodes below the root, or fewer if `nodes` is too small. The remaining
    nodes are spread evenly, as children of the nodes on the path.
    """
    deepest = min(num_steps, nodes - 1)
    parents = [0, *range(deepest), *((node % max(1, deepest)) for node in range(nodes - 1 - deepest))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    above = torch.tensor(parents, device=device)
    path = torch.arange(nodes, device=device) <= deepest
    return TreeTemplate(above, torch.tensor(depths, device=device), ancestors_of(above[None], deepest)[0], path)


class OracleDraft:
    """A `Draft` whose trees have an accept length of `accept_length` on average, bonus token included.

    A target that deviates from the truth, as rounding in half precision may cause, accepts fewer tokens.
    """

    def __init__(self, inner: Draft, truth: Truth, accept_length: float, vocab: int, device: torch.device) -> None:
        self._inner, self._truth, self._wanted, self._vocab = inner, truth, accept_length - 1, vocab
        self._luck = torch.rand(LUCK, generator=torch.Generator().manual_seed(0)).to(device)

    def draft(self, batch: Batch, carried: EagleDraftInput, drawing: PhaseSampling, shape: TreeShape) -> DraftTree:
        """Run the real draft, and return the oracle's tree of the same size."""
        tree = self._inner.draft(batch, carried, drawing, shape)
        (r, n), steps = tree.tokens.shape, shape.num_steps
        if not steps:
            return tree
        made = template(steps, n, tree.tokens.device)
        truth = self._truth.after(batch, carried.bonus, steps).index_select(1, made.depths)
        luck = self._luck.index_select(0, (batch.seq_lens + 7 * batch.decode_rows) % LUCK)
        # Correct to depth floor(luck + wanted); for luck uniform in [0, 1), the mean of that depth is `wanted`.
        right = made.path & (made.depths <= (luck + self._wanted)[:, None])
        wrong = torch.where(tree.tokens == truth, (truth + 1) % self._vocab, tree.tokens)
        tokens = torch.where(right, truth, wrong)
        shapes = made.parents.expand(r, n), made.depths.expand(r, n), made.ancestors.expand(r, n, n)
        return DraftTree(tokens, *shapes)

    def extend(
        self, batch: Batch, accepted: Accepted, features: list[Tensor], draw: SamplingInputs, shape: TreeShape
    ) -> EagleDraftInput:
        """Run the real draft's extend."""
        return self._inner.extend(batch, accepted, features, draw, shape)
